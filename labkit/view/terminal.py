"""A run followed in a terminal."""

from __future__ import annotations

import shutil
import sys

__all__ = ["StatusLine"]


class StatusLine:
    """One line of a terminal, written over and over; where nobody sees it move, a line now and then."""

    def __init__(self) -> None:
        self.is_live = sys.stdout.isatty()
        self._width = 0

    def show(self, text: str) -> None:
        if not self.is_live:
            print(text, flush=True)
            return
        text = text[: shutil.get_terminal_size().columns - 1]
        print(f"\r{text:<{self._width}}", end="", flush=True)
        self._width = len(text)

    def clear(self) -> None:
        if self.is_live and self._width:
            print(f"\r{'':<{self._width}}\r", end="", flush=True)
