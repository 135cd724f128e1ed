"""Draws memory by category as stacked horizontal bars in SVG text, against a device's capacity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from labkit.record import Peak
from labkit.text import escaped, gib
from labkit.view.charts.images import Palette

WIDTH, LEFT, RIGHT = 760, 132, 224  # LEFT: room for names; RIGHT: room for notes
ROW, GAP, TOP, BOTTOM = 15, 5, 16, 18
NEAR = 4.0  # a limit up to this multiple of the longest bar is drawn
FAR = 2.5  # a bar longer than this multiple of the limit is cut
LETTER, BROAD = 5.3, 5.9  # pixels per character at this font size: the usual, and the most of a category's name


class Bar(NamedTuple):
    """`held` has the bytes by category, and is None if they could not be planned; `note` follows the bar. `source` is
    "planned" or "measured". A `rough` bar is marked with ~, a `chosen` one, too."""

    name: str
    held: Mapping[str, int] | None
    note: str = ""
    source: str = "planned"
    fits: bool = True
    chosen: bool = False
    rough: bool = False

    @property
    def total(self) -> str:
        """`~2.84 GiB`"""
        return ("~" if self.rough else "") + gib(sum((self.held or {}).values()))


def bars(
    rows: Sequence[Bar], limit: float | None = None, limit_name: str = "", categories: Sequence[str] = Peak.CATEGORIES
) -> str:
    """The bars and the legend of these categories; empty without bars. Bars with the same name are grouped. `limit` is
    in bytes; one far beyond all bars is printed, not drawn."""
    if not rows:
        return ""
    totals = [sum(row.held.values()) for row in rows if row.held]
    longest = max(totals, default=0) or 1
    near = limit is not None and limit <= NEAR * longest
    end = min(max(longest, limit), FAR * limit) if near and limit else longest
    room = WIDTH - LEFT - RIGHT
    line = LEFT + limit * room / (1.02 * end) if near and limit else None
    drawn, y, before = "", TOP, None
    for row in rows:
        y += GAP if before not in (None, row.name) else 0
        drawn += _bar(row, y, room / (1.02 * end), line, first=row.name != before)
        y, before = y + ROW, row.name
    limit_mark = ""
    if limit is not None:
        words = f"{limit_name} {gib(limit)}".strip()
        if line:
            limit_mark = (
                f'<path d="M{line:.1f} {TOP - 3}V{y + 2}" stroke="{Palette.LIMIT}" stroke-width="1.5" '
                f'stroke-dasharray="5 2"/><text x="{line:.1f}" y="10" text-anchor="middle" opacity=".8">'
                f"{escaped(words)}</text>"
            )
        else:
            limit_mark = f'<text x="{LEFT}" y="10" opacity=".8">{escaped(words)}: far beyond all of these</text>'
    label = escaped("; ".join(_summary(row) for row in rows))
    height = y + BOTTOM - ROW + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}" '
        f'style="width:100%;max-width:{WIDTH}px;height:auto" font-family="system-ui,sans-serif" font-size="10" '
        f'fill="currentColor">{limit_mark}{drawn}</svg>{_legend(categories)}'
    )


def _legend(categories: Sequence[str]) -> str:
    """The legend, in the order in which a bar is stacked."""
    marks = "".join(
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:10px;height:10px;'
        f'border-radius:2px;background:{Palette.MEMORY[name]};margin:0 4px 0 0"></span>{name}</span>'
        for name in categories
    )
    return f'<div style="display:flex;gap:2px 14px;flex-wrap:wrap;font-size:11px;opacity:.85">{marks}</div>'


def _bar(row: Bar, y: float, scale: float, line: float | None, *, first: bool) -> str:
    """A bar with its name and its note, which does not cross the limit, at `line`."""
    middle = y + ROW - 5
    name = f"{'▸ ' if row.chosen else ''}{row.name}" if first else ""
    if row.source != "planned":
        name = f"{name} {row.source}".strip() if first else row.source
    strength = ' font-weight="700"' if row.chosen else "" if first else ' opacity=".75"'
    drawn = f'<text x="{LEFT - 6}" y="{middle}" text-anchor="end"{strength}>{escaped(_cut(name, LEFT - 6))}</text>'
    if row.held is None:
        return drawn + _note(row.note, LEFT, y, WIDTH - LEFT, ".75")
    x, end = float(LEFT), WIDTH - RIGHT
    for category, colour in Palette.MEMORY.items():
        size = row.held.get(category, 0)
        width = min(size * scale, end - x)
        if width > 0:
            shown = category if len(category) * BROAD < width - 6 else ""
            inside = f'<text x="{x + 3:.1f}" y="{middle}" fill="#000">{shown}</text>' if shown else ""
            drawn += (
                f'<g><title>{escaped(f"{category} {gib(size)}")}</title><rect x="{x:.1f}" y="{y}" '
                f'width="{width:.1f}" height="{ROW - 2}" fill="{colour}"/>{inside}</g>'
            )
        x += width
    cut = sum(row.held.values()) * scale > end - LEFT + 0.5
    note = f"{row.total}{f' · {row.note}' if row.note else ''}"
    mark = "▸ " if cut else ""
    note = ("" if row.fits else "✖ ") + mark + note
    if line and x < line < x + 8 + len(note) * LETTER:
        x = line
    return drawn + _note(note, x + 5, y, WIDTH - x - 5, "" if row.fits else ".9")


def _note(text: str, x: float, y: float, room: float, opacity: str) -> str:
    faint = f' opacity="{opacity}"' if opacity else ""
    whole = f"<title>{escaped(text)}</title>" if len(text) * LETTER > room else ""
    return f'<text x="{x:.1f}" y="{y + ROW - 5}"{faint}>{whole}{escaped(_cut(text, room))}</text>'


def _cut(text: str, room: float) -> str:
    letters = int(room / LETTER)
    return text if len(text) <= letters else text[: max(0, letters - 1)] + "…"


def _summary(row: Bar) -> str:
    if row.held is None:
        return f"{row.name}: {row.note}"
    held = ", ".join(f"{name} {gib(size)}" for name, size in row.held.items() if size)
    return f"{row.name} {row.source}: {row.total} ({held})" + ("" if row.fits else ", does not fit")
