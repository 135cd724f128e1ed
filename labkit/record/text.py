"""Text from ranks, file names and folders that somebody shared, made fit to be shown: the one place that does it."""

from __future__ import annotations

import html
import re

__all__ = ["escaped", "plain"]

# Colours and cursor movements of terminals, and what they leave behind.
ANSI = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Text as a person would have seen it last in a terminal: no colour codes, no overwritten progress bars."""
    text = ANSI.sub("", text.replace("\r\n", "\n")).encode("utf-8", "replace").decode()
    return "\n".join(CONTROL.sub("�", line.rstrip("\r").rsplit("\r", 1)[-1]) for line in text.split("\n"))


def escaped(text: str) -> str:
    """The same as HTML, for an element's content or an attribute's value."""
    return html.escape(plain(text), quote=True)
