"""Makes untrusted text safe to display: output of ranks, file names, shared folders. The single place that does it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

# Terminal escape sequences for colors and cursor movements, and other control characters.
ANSI = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
LONGEST = 10_000  # characters
LONGEST_LINE = 500


def plain(text: str) -> str:
    """Text as a terminal would finally show it: no color codes, no overwritten progress bars."""
    if text.isprintable():
        return text
    text = ANSI.sub("", text.replace("\r\n", "\n")).encode("utf-8", "replace").decode()
    return "\n".join(CONTROL.sub("�", line.rstrip("\r").rsplit("\r", 1)[-1]) for line in text.split("\n"))


def escaped(text: str) -> str:
    """`plain(text)` as HTML, for an element's content or an attribute's value."""
    import html  # ranks use this module: a script may have a module of that name

    return html.escape(plain(text), quote=True)


def framed(html: str) -> str:
    """The HTML in the font, the size and the greatest width of every view of labkit's."""
    style = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;max-width:760px;overflow-wrap:break-word"
    return f'<div style="{style}">{html}</div>'


def pill(text: str, tint: str) -> str:
    """A word or two about a state as HTML, with a border and a background in its colour; a mark in front stays with its
    word. A live view hides it when its kernel is gone."""
    style = f"border:1px solid {tint};background:{tint}30;border-radius:10px;padding:0 9px;display:inline-block"
    shown = escaped(text).replace(" ", "&nbsp;", 1)
    return f'<b class="labkit-state" style="{style}">{shown}</b>'


def in_lines(notice: str) -> str:
    """A notice about ranks as HTML: what is wrong, then where each rank is, on a line of its own; code as code."""
    parted = re.sub(r"`[^`]*`|; |\. (?=Ranks? )", lambda found: found[0] if found[0][0] == "`" else "\n", notice)
    first, *ranks = parted.split("\n")
    shown = (with_code(rank[:1].upper() + rank[1:]) for rank in ranks)
    return f"<b>{with_code(first)}</b>" + "".join(f"<div>{rank}</div>" for rank in shown)


def with_code(text: str) -> str:
    """A text as HTML, code in it as code."""
    parts = [escaped(part) for part in re.split("`([^`]*)`", text)]
    parts[1::2] = [f"<code>{code}</code>" for code in parts[1::2]]
    return "".join(parts)


def shortened(text: str, longest: int = LONGEST) -> str:
    """A text of more than `longest` characters shortened to its start, its length and its end."""
    if len(text) <= longest:
        return text
    gap = f"\n[… {len(text):,} characters in total …]\n"
    half = (longest - len(gap)) // 2
    return text[:half] + gap + text[-half:]


def listed(names: Sequence[str], most: int = 1) -> str:
    """`a, b and 3 more`: the first `most` names, and how many others there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def first_line(text: str) -> str:
    """The first line that contains a word, and the next one if it ends with a colon; at most 500 characters."""
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    return _cut(" ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]))


def last_line(text: str) -> str:
    """The last line that contains a word, which skips rules such as those around torchrun's summary."""
    return _cut(next((line.strip() for line in reversed(text.splitlines()) if re.search(r"\w", line)), ""))


def _cut(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…"


def gib(size: float | None) -> str:
    """Bytes as GiB, smaller sizes as MiB, KiB or bytes."""
    if size is None:
        return "n/a"
    if size == 0:
        return "0"
    for unit, digits, name in ((2**30, 2, "GiB"), (2**20, 1, "MiB"), (2**10, 1, "KiB")):
        if size >= unit:
            return f"{size / unit:,.{digits}f} {name}"
    return f"{size:.0f} B"


@lru_cache(maxsize=4096)  # for as many hosts
def slug(name: str) -> str:
    """`name` reduced to characters that are safe in a file name on every system, never empty or hidden."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-_")[:60] or "run"


def without_nan(record: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity, which JSON lacks, by text: a NaN loss must be readable."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
