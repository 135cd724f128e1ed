"""Shows what ranks print and display while they execute a cell, below it; those with the same output once."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.files import opened
from labkit.frontend import notebook_shell
from labkit.record import RunFolder
from labkit.text import escaped, gib, plain
from labkit.worker import CellAnswer, CellFolder

MOST_BYTES = 40_000  # of each rank's stdout and stderr that are shown: the start and the end
LIVE_BYTES = 2_000  # of each while the cell runs: the end
DRAW_SECONDS = 0.25
STREAMS = ("stdout", "stderr")
PRE = "margin:0 0 6px;white-space:pre-wrap;overflow-wrap:anywhere;max-height:40em;overflow:auto"
LABEL = "font:600 12px system-ui,sans-serif;opacity:.65;margin-top:2px"


class CellOutput:
    """The output of one cell. A notebook shows it while the cell runs, a terminal at the end; without a `folder`
    nothing is shown."""

    def __init__(self, folder: RunFolder | None):
        self._folder = folder
        self._handle: Any = None
        self._began = self._drawn = time.monotonic()
        self._cell: CellFolder | None = None
        self._answers: Mapping[int, CellAnswer] = {}
        self._notes: list[str] = []

    def note(self, text: str) -> None:
        """Say something that is not of the ranks."""
        self._notes.append(text)
        if self._folder is not None and notebook_shell() is None:
            print(text, file=sys.stderr, flush=True)

    def update(self, cell: CellFolder, answers: Mapping[int, CellAnswer]) -> None:
        """Draw the newest output, some times a second."""
        self._cell, self._answers = cell, answers
        now = time.monotonic()
        if self._folder is None or notebook_shell() is None or now - self._drawn < DRAW_SECONDS:
            return
        self._drawn = now
        self._draw(self._texts(LIVE_BYTES))

    def end(self) -> None:
        """Show all of it."""
        if self._folder is None or self._cell is None:
            return
        texts = self._texts(MOST_BYTES)
        if notebook_shell() is None:
            print(_as_text(texts), end="", flush=True)
        elif texts or self._handle is not None or self._notes:
            self._draw(texts)
        for ranks, bundle in self._displays():
            _display(ranks, bundle)

    def _draw(self, texts: dict[str, str]) -> None:
        from IPython.display import display

        notes = "".join(f'<div style="{LABEL}">{escaped(note)}</div>' for note in self._notes)
        bundle = {
            "text/plain": _as_text(texts) + "".join(f"{note}\n" for note in self._notes),
            "text/html": "".join(_block(ranks, text) for ranks, text in texts.items()) + notes,
        }
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def _texts(self, most: int) -> dict[str, str]:
        """What ranks have printed, by who they are."""
        assert self._folder is not None and self._cell is not None
        by_text: dict[str, list[int]] = {}
        for rank, began in sorted(self._cell.begun().items()):
            answer = self._answers.get(rank)
            ends = (None, None) if answer is None else answer.logs
            logs = zip(STREAMS, began, ends, strict=True)
            text = "".join(_between(self._folder.log(rank, stream), start, end, most) for stream, start, end in logs)
            if text.strip():
                by_text.setdefault(text, []).append(rank)
        return {named(ranks): text for text, ranks in by_text.items()}

    def _displays(self) -> list[tuple[str, dict[str, Any]]]:
        """What ranks have displayed, each with who they are."""
        found: list[tuple[list[int], dict[str, Any]]] = []
        for rank, answer in sorted(self._answers.items()):
            for bundle in answer.displays:
                same = next((ranks for ranks, other in found if other == bundle and rank not in ranks), None)
                if same is None:
                    found.append(([rank], bundle))
                else:
                    same.append(rank)
        return [(named(ranks), bundle) for ranks, bundle in found]


def named(ranks: Sequence[int]) -> str:
    """`rank 1` · `ranks 0, 1`."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _between(path: Path, start: int, end: int | None, most: int) -> str:
    """The log from one size to another, or to its end; if it is long, its start and its end."""
    try:
        with opened(path) as file:
            stop = file.seek(0, 2) if end is None else end
            size = max(0, stop - start)
            if size <= most:
                file.seek(start)
                return plain(file.read(size).decode("utf-8", "replace"))
            file.seek(start)
            first = file.read(most // 2)
            file.seek(stop - most // 2)
            last = file.read(most // 2)
    except OSError:
        return ""
    gap = f"\n[… {gib(size - most)} left out; logs(rank=…) has all of it …]\n"
    return plain(first.decode("utf-8", "replace") + gap + last.decode("utf-8", "replace"))


def _as_text(texts: Mapping[str, str]) -> str:
    return "".join(f"== {ranks} ==\n{text.rstrip()}\n" for ranks, text in texts.items())


def _block(ranks: str, text: str) -> str:
    return f'<div style="{LABEL}">{escaped(ranks)}</div><pre style="{PRE}">{escaped(text.rstrip())}</pre>'


def _display(ranks: str, bundle: Mapping[str, Any]) -> None:
    if notebook_shell() is None:
        print(f"== {ranks} ==\n{plain(str(bundle.get('text/plain', '')))}", flush=True)
        return
    from IPython.display import display

    display({"text/plain": ranks, "text/html": f'<div style="{LABEL}">{escaped(ranks)}</div>'}, raw=True)
    display(dict(bundle), raw=True)
