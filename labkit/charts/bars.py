"""Draws stacked horizontal bars as SVG, such as memory by category, against a limit."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

from labkit.charts.data import Bar, Bars
from labkit.charts.images import Palette, Picture
from labkit.text import escaped

WIDTH, LEFT, RIGHT = 560, 116, 196  # LEFT: room for names; RIGHT: room for notes
STYLE = "width:100%;max-width:680px;height:auto"
ROW, GAP, TOP, BOTTOM = 16, 5, 4, 4
LINE = 15  # of text above the bars
NEAR = 4.0  # a limit up to this multiple of the longest bar is drawn
FAR = 2.5  # a bar longer than this multiple of the limit is cut
LETTER, BROAD = 5.6, 6.1  # pixels per character at this font size: the usual, and the most of a category's name
SIZE = 11


def bars_picture(drawn: Bars) -> Picture:
    totals = [row.total for row in drawn.rows if row.held]
    longest, limit = max(totals, default=0) or 1, drawn.limit
    near = limit is not None and limit <= NEAR * longest
    end = min(max(longest, limit), FAR * limit) if near and limit else longest
    scale = (WIDTH - LEFT - RIGHT) / (1.02 * end)
    line = LEFT + limit * scale if near and limit else None
    parts, y = [], float(TOP)
    if drawn.title:
        parts.append(f'<text x="0" y="{y + 9}" font-weight="600">{escaped(drawn.title)}</text>')
        y += LINE + 2
    colours = colours_of(drawn)
    legend, y = _legend(colours, y) if len(colours) > 1 else ("", y)
    parts.append(legend)
    if limit is not None:
        words = f"{drawn.limit_name} {drawn.show(limit)}".strip() + ("" if line else ": far beyond all of these")
        x, anchor = (min(line, WIDTH - len(words) * LETTER / 2), "middle") if line else (LEFT, "start")
        parts.append(f'<text x="{x:.1f}" y="{y + 10}" text-anchor="{anchor}" opacity=".8">{escaped(words)}</text>')
        y += LINE
    top, before = y, None
    mixed = len({row.source for row in drawn.rows}) > 1
    for row in drawn.rows:
        y += GAP if before not in (None, row.name) else 0
        parts.append(_bar(drawn, row, y, scale, line, colours, first=row.name != before, mixed=mixed))
        y, before = y + ROW, row.name
    if line:
        parts.append(
            f'<path d="M{line:.1f} {top - 3}V{y + 2}" stroke="{Palette.LIMIT}" stroke-width="1.5" '
            'stroke-dasharray="5 2"/>'
        )
    said = "; ".join(_summary(drawn, row) for row in drawn.rows)
    return Picture("".join(parts), WIDTH, y + BOTTOM, f"{drawn.title}: {said}" if drawn.title else said, SIZE, STYLE)


def colours_of(drawn: Bars) -> dict[str, str]:
    """A colour for each category, in the order in which a bar is stacked: memory's own, then others."""
    names = dict.fromkeys(name for row in drawn.rows for name in row.held or ())
    known: Mapping[str, str] = {**Palette.MEMORY, "waits": Palette.GREY}
    fixed = {name: colour for name, colour in known.items() if name in names}
    free = [colour for colour in Palette.LINES if colour not in fixed.values()]
    return fixed | dict(zip([name for name in names if name not in known], cycle(free), strict=False))


def _legend(colours: Mapping[str, str], y: float) -> tuple[str, float]:
    """The legend, in as many lines as it needs; and where it ends."""
    x, drawn = 0.0, ""
    for name, colour in colours.items():
        wide = 26 + BROAD * len(name)
        x, y = (0.0, y + LINE) if x + wide > WIDTH and x else (x, y)
        drawn += f'<rect x="{x:.0f}" y="{y:.0f}" width="10" height="10" rx="2" fill="{colour}"/>'
        drawn += f'<text x="{x + 14:.0f}" y="{y + 9:.0f}">{escaped(name)}</text>'
        x += wide
    return drawn, y + LINE + 2


def _bar(
    drawn: Bars,
    row: Bar,
    y: float,
    scale: float,
    line: float | None,
    colours: Mapping[str, str],
    *,
    first: bool,
    mixed: bool,
) -> str:
    """A bar with its name and its note, which does not cross the limit, at `line`."""
    middle = y + ROW - 4
    name = f"{'▸ ' if row.chosen else ''}{row.name}" if first else ""
    if mixed and (row.source != "planned" or not first):
        name = f"{name} {row.source}".strip()
    strength = ' font-weight="700"' if row.chosen else "" if first else ' opacity=".75"'
    whole = f"<title>{escaped(name)}</title>" if len(name) * LETTER > LEFT - 6 else ""
    parts = (
        f'<text x="{LEFT - 6}" y="{middle}" text-anchor="end"{strength}>{whole}{escaped(_cut(name, LEFT - 6))}</text>'
    )
    if row.held is None:
        return parts + _note(row.note, LEFT, middle, WIDTH - LEFT, ".75")
    x, end = float(LEFT), WIDTH - RIGHT
    for category, colour in colours.items():
        size = row.held.get(category, 0)
        width = min(size * scale, end - x)
        if width > 0:
            shown = len(category) * BROAD < width - 6 and len(colours) > 1
            inside = f'<text x="{x + 3:.1f}" y="{middle}" fill="#000">{escaped(category)}</text>' if shown else ""
            parts += (
                f'<g><title>{escaped(f"{category} {drawn.show(size)}")}</title><rect x="{x:.1f}" y="{y}" '
                f'width="{width:.1f}" height="{ROW - 2}" fill="{colour}"/>{inside}</g>'
            )
            x += width
    cut = row.total * scale > end - LEFT + 0.5
    note = f"{'' if row.fits else '✖ '}{'▸ ' if cut else ''}{drawn.shown(row)}{f' · {row.note}' if row.note else ''}"
    if line and x < line < x + 8 + len(note) * LETTER:
        x = line
    return parts + _note(note, x + 5, middle, WIDTH - x - 5, "" if row.fits else ".9")


def _note(text: str, x: float, bottom: float, room: float, opacity: str) -> str:
    faint = f' opacity="{opacity}"' if opacity else ""
    whole = f"<title>{escaped(text)}</title>" if len(text) * LETTER > room else ""
    return f'<text x="{x:.1f}" y="{bottom}"{faint}>{whole}{escaped(_cut(text, room))}</text>'


def _cut(text: str, room: float) -> str:
    letters = int(room / LETTER)
    return text if len(text) <= letters else text[: max(0, letters - 1)] + "…"


def _summary(drawn: Bars, row: Bar) -> str:
    if row.held is None:
        return f"{row.name}: {row.note}"
    held = ", ".join(f"{name} {drawn.show(size)}" for name, size in row.held.items() if size)
    return f"{row.name} {row.source}: {drawn.shown(row)} ({held})" + ("" if row.fits else ", does not fit")
