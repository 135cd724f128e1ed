"""Values in a YAML file that people read: labkit's files are written as text, with their comments, so this is all of
YAML that they need. What is written reads back as the same text under YAML 1.1 (PyYAML) and 1.2 (Kubernetes)."""

from __future__ import annotations

import re

__all__ = ["block", "items", "scalar"]

PLAIN = re.compile(r"(--)?[A-Za-z/][A-Za-z0-9_./-]*")
# A reader takes these for something other than text: YAML 1.1's booleans and null.
WORDS = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}
# What YAML's `c-printable` leaves out, and what some readers take for the end of a line.
UNPRINTABLE = re.compile("[^\t\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


def scalar(text: str) -> str:
    """Text as one word where no reader can take it for anything else, quoted otherwise."""
    if PLAIN.fullmatch(text) and text.lower() not in WORDS:
        return text
    special = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}
    quoted = re.sub(r'[\\"\n\t]', lambda found: special[found[0]], text)
    return '"' + UNPRINTABLE.sub(lambda found: f"\\U{ord(found[0]):08x}", quoted) + '"'


def block(text: str, indent: int) -> str:
    """Text of several lines as they are, `indent` spaces in, which is two more than their key; quoted where they hold
    what a block cannot."""
    if UNPRINTABLE.search(text) or not text.strip() or not text.endswith("\n") or text.endswith("\n\n"):
        return scalar(text)
    # a text that begins with a space would be taken for one that is further in
    further = "2" if text.lstrip("\n").startswith(" ") else ""
    lines = [" " * indent + line if line else "" for line in text[:-1].split("\n")]
    return "\n".join([f"|{further}", *lines])


def items(texts: list[str] | tuple[str, ...], indent: int) -> str:
    """A list, one text to a line."""
    return "\n".join(f"{' ' * indent}- {scalar(text)}" for text in texts)
