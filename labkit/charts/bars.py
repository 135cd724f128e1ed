"""Draws stacked horizontal bars as SVG, such as memory by category, against a limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle

from labkit.charts.data import NEAR, Bar, Bars
from labkit.charts.images import Palette, Picture, legend, swatch
from labkit.text import escaped

WIDTH = 560
STYLE = "width:100%;min-width:616px;max-width:680px;height:auto"  # or its text is too small
NAMES, NOTES = (60, 190), (70, 230)  # the least and the most room for names to the left, for notes to the right
ROW, GAP, MARGIN = 16, 5, 4
LINE = 15  # of text above the bars
FAR = 2.5  # a bar longer than this multiple of the limit is cut
LETTER, BROAD = 5.6, 6.1  # pixels per character at this font size: the usual, and the most of a category's name
SIZE = 11


@dataclass(frozen=True)
class _Frame:
    """Where bars begin and end, in pixels, and what they have in common."""

    drawn: Bars
    left: float
    right: float
    scale: float
    line: float | None
    colours: Mapping[str, str]
    mixed: bool  # planned and measured ones


def bars_picture(drawn: Bars) -> Picture:
    frame = _frame(drawn)
    parts, y = [], float(MARGIN)
    if drawn.title:
        parts.append(f'<text x="0" y="{y + 9}" font-weight="600">{escaped(drawn.title)}</text>')
        y += LINE + 2
    key, y = legend(_in_legend(frame), 0.0, y, WIDTH)
    parts.append(key)
    if drawn.limit is not None:
        words = f"{drawn.limit_name} {drawn.show(drawn.limit)}".strip()
        words += "" if frame.line else ": far beyond all of these"
        half = len(words) * LETTER / 2
        x = min(frame.line, WIDTH - half) if frame.line else frame.left + half
        parts.append(f'<text x="{x:.1f}" y="{y + 10}" text-anchor="middle" opacity=".8">{escaped(words)}</text>')
        y += LINE
    top, before = y, None
    for row in drawn.rows:
        y += GAP if before not in (None, row.name) else 0
        parts.append(_bar(frame, row, y, first=row.name != before))
        y, before = y + ROW, row.name
    if frame.line:
        way = f"M{frame.line:.1f} {top - 3}V{y + 2}"
        parts.append(f'<path d="{way}" stroke="{Palette.LIMIT}" stroke-width="1.5" stroke-dasharray="5 2"/>')
    said = "; ".join(_summary(drawn, row) for row in drawn.rows)
    label = f"{drawn.title}: {said}" if drawn.title else said
    return Picture("".join(parts), WIDTH, y + MARGIN, label, SIZE, STYLE)


def _frame(drawn: Bars) -> _Frame:
    longest, limit = max((row.total for row in drawn.rows if row.held), default=0) or 1, drawn.limit
    near = limit is not None and limit <= NEAR * longest
    end = min(max(longest, limit), FAR * limit) if near and limit and limit > 0 else longest
    left = _room(NAMES, (f"▸ {row.name}" for row in drawn.rows))
    right = WIDTH - _room(NOTES, (_measure(drawn, row, "▸ ") for row in drawn.rows if row.held))
    scale = (right - left) / (1.02 * end)
    line = left + max(0.0, limit) * scale if near and limit is not None else None  # nothing may be left of a device
    return _Frame(drawn, left, right, scale, line, colours_of(drawn), len({row.source for row in drawn.rows}) > 1)


def _room(bounds: tuple[int, int], texts: Iterable[str]) -> float:
    least, most = bounds
    return min(most, max([least, *(12 + LETTER * len(text) for text in texts)]))


def colours_of(drawn: Bars) -> dict[str, str]:
    """A colour for each category, in the order in which a bar is stacked: memory's own, then others."""
    names = dict.fromkeys(name for row in drawn.rows for name in row.held or ())
    known: Mapping[str, str] = {**Palette.MEMORY, "waits": Palette.GREY}
    fixed = {name: colour for name, colour in known.items() if name in names}
    free = [colour for colour in Palette.LINES if colour not in fixed.values()]
    return fixed | dict(zip([name for name in names if name not in known], cycle(free), strict=False))


def _in_legend(frame: _Frame) -> list[tuple[str, str]]:
    """The categories, and what is paler."""
    marks = [(f'fill="{colour}"', name) for name, colour in frame.colours.items()] if len(frame.colours) > 1 else []
    for source in dict.fromkeys(row.source for row in frame.drawn.rows):
        if pale := _pale(frame, source):
            marks.append((f'fill="{Palette.GREY}"{pale}', f"paler: {source}"))
    return [(swatch(look), name) for look, name in marks]


def _pale(frame: _Frame, source: str) -> str:
    return ' fill-opacity=".5"' if frame.mixed and source != "measured" else ""


def _bar(frame: _Frame, row: Bar, y: float, *, first: bool) -> str:
    """A bar with its name and its note, which does not cross the limit's line."""
    x, bottom = frame.left, y + ROW - 4
    drawn = _name(frame, row, bottom, first=first)
    if row.held is None:
        return drawn + _note(row.note, x, bottom, ".75")
    pale = _pale(frame, row.source)
    for category, colour in frame.colours.items():
        size = row.held.get(category, 0)
        width = min(size * frame.scale, frame.right - x)
        if width > 0:
            shown = len(category) * BROAD < width - 6 and len(frame.colours) > 1 and not pale
            inside = f'<text x="{x + 3:.1f}" y="{bottom}" fill="#000">{escaped(category)}</text>' if shown else ""
            drawn += (
                f"<g><title>{escaped(f'{category} {frame.drawn.show(size)}')}</title>"
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 2}" fill="{colour}"'
                f"{pale}/>{inside}</g>"
            )
            x += width
    cut = row.total * frame.scale > frame.right - frame.left + 0.5
    measure = _measure(frame.drawn, row, "▸ " if cut else "")
    if frame.line and x < frame.line < x + 8 + len(measure) * LETTER:
        x = frame.line
    return drawn + _note(measure, x + 5, bottom, "" if row.fits else ".9")


def _name(frame: _Frame, row: Bar, bottom: float, *, first: bool) -> str:
    name = f"{'▸ ' if row.chosen else ''}{row.name}" if first else ""
    if frame.mixed and (row.source == "measured" or not first):
        name = f"{name} {row.source}".strip()
    look = ' font-weight="700"' if row.chosen else "" if first else ' opacity=".75"'
    room = frame.left - 6
    whole = f"<title>{escaped(name)}</title>" if len(name) * LETTER > room else ""
    return f'<text x="{room:.1f}" y="{bottom}" text-anchor="end"{look}>{whole}{escaped(_cut(name, room))}</text>'


def _measure(drawn: Bars, row: Bar, mark: str) -> str:
    """What stands behind a bar: `✖ ~2.84 GiB · 12 ms`"""
    return f"{'' if row.fits else '✖ '}{mark}{drawn.shown(row)}{f' · {row.note}' if row.note else ''}"


def _note(text: str, x: float, bottom: float, opacity: str) -> str:
    faint, room = f' opacity="{opacity}"' if opacity else "", WIDTH - x
    whole = f"<title>{escaped(text)}</title>" if len(text) * LETTER > room else ""
    return f'<text x="{x:.1f}" y="{bottom}"{faint}>{whole}{escaped(_cut(text, room))}</text>'


def _cut(text: str, room: float) -> str:
    letters = int(room / LETTER)
    return text if len(text) <= letters else text[: max(0, letters - 1)] + "…"


def _summary(drawn: Bars, row: Bar) -> str:
    if row.held is None:
        return f"{row.name}: {row.note}"
    held = [f"{name} {drawn.show(size)}" for name, size in row.held.items() if size]
    parts = f" ({', '.join(held)})" if len(held) > 1 else ""
    return f"{row.name} {row.source}: {drawn.shown(row)}{parts}" + ("" if row.fits else ", does not fit")
