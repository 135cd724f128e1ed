"""Draws quantities as bars: what was predicted above, what was measured below, in the same color."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

from labkit.text import gib
from labkit.view import Palette
from labkit_labs.claims import amount
from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, colour_of, sheet, words

__all__ = ["Quantity", "bars"]

Quantity = float | Mapping[str, float]  # in all, or by category
RIGHT, TALL = 104, 16
HATCH = (
    f'<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<path d="M0 0V6" stroke="{GREY}" stroke-width="2.5"/></pattern>'
)


def bars(
    measured: Mapping[str, Quantity] | None = None,
    predicted: Mapping[str, Quantity] | None = None,
    *,
    unit: str = "",
    title: str = "",
    limit: float | None = None,
    limit_name: str = "",
) -> Picture:
    """A group for each name: predicted (hatched), then measured (full). `limit`, in the same unit, is a line."""
    measured, predicted = measured or {}, predicted or {}
    rows: list[tuple[str, str, Quantity]] = []
    for name in dict.fromkeys([*predicted, *measured]):
        rows += [(name, "predicted", predicted[name])] if name in predicted else []
        rows += [(name, "measured", measured[name])] if name in measured else []
    both = bool(measured) and bool(predicted)
    parts_of = [_in_order(q) if isinstance(q, Mapping) else {name: q} for name, _, q in rows]
    categories = [*_in_order({category: 0.0 for _, _, q in rows if isinstance(q, Mapping) for category in q})]
    colours = _colours(categories)
    longest = max([*(sum(parts.values()) for parts in parts_of), limit or 0.0]) or 1.0
    left = min(250.0, 14 + 7.2 * max([len(name) for name, _, _ in rows], default=0))
    scale = (WIDTH - left - RIGHT) / longest
    drawn, y = [HATCH], 0.0
    if title:
        drawn.append(words(0, 15, title, bold=True))
        y = 24
    legend, y = _legend(categories, colours, y, both)
    drawn.append(legend)
    y += 14 if limit else 0
    top, before = y, ""
    for (name, how, _), parts in zip(rows, parts_of, strict=True):
        if name != before:
            y += 8
            drawn.append(
                words(left - 8, y + 13 + (9 if name in measured and name in predicted else 0), name, anchor="end")
            )
        x = left
        for category, value in parts.items():
            colour = colours.get(category, colour_of(0))
            drawn.append(box(x, y, value * scale, TALL, colour, opacity=0.45 if how == "predicted" else 1, round=0))
            x += max(0.0, value * scale)
        if how == "predicted":
            drawn.append(box(left, y, x - left, TALL, "url(#hatch)", round=0, line=GREY, opacity=0.5))
        number = _shown(sum(parts.values()), unit)
        if limit and x < left + limit * scale < x + 12 + 7 * len(number):
            x = left + limit * scale
        drawn.append(words(x + 6, y + 13, number, size=12))
        y, before = y + TALL + 2, name
    if limit:
        x = left + limit * scale
        drawn.append(f'<path d="M{x:.0f} {top}V{y}" stroke="{Palette.LIMIT}" stroke-width="2" stroke-dasharray="5 3"/>')
        drawn.append(
            words(min(x, WIDTH - 60), top - 3, f"{limit_name} {_shown(limit, unit)}".strip(), anchor="middle", size=12)
        )
    label = "; ".join(
        f"{n} {how}: {_shown(sum(p.values()), unit)}" for (n, how, _), p in zip(rows, parts_of, strict=True)
    )
    return sheet(drawn, y + 6, f"{title}: {label}" if title else label)


def _shown(number: float, unit: str) -> str:
    """Rounded, so that bytes of all bars have units of the same kind."""
    return gib(number) if unit == "B" else amount(number, unit)


def _in_order(parts: Mapping[str, float]) -> dict[str, float]:
    """Memory's categories first, in the same order everywhere."""
    return {name: parts[name] for name in (*Palette.MEMORY, *parts) if name in parts}


def _colours(categories: Sequence[str]) -> dict[str, str]:
    known = {**Palette.MEMORY, "waits": GREY}  # as in a timeline
    fixed = {name: known[name] for name in categories if name in known}
    others = [name for name in categories if name not in known]
    free = [colour for colour in map(colour_of, range(8)) if colour not in fixed.values()]
    return fixed | dict(zip(others, cycle(free), strict=False))


def _legend(categories: Sequence[str], colours: Mapping[str, str], y: float, both: bool) -> tuple[str, float]:
    marks = [(name, colours[name], 1.0) for name in categories]
    marks += [("predicted (solid: measured)", "url(#hatch)", 0.5)] if both else []
    x, drawn = 0.0, ""
    for name, colour, opacity in marks:
        wide = 24 + 7 * len(name)
        x, y = (0.0, y + 18) if x + wide > WIDTH else (x, y)
        drawn += box(x, y + 2, 11, 11, colour, opacity=opacity, line=GREY if colour.startswith("url") else "")
        drawn += words(x + 15, y + 12, name, size=12)
        x += wide
    return drawn, y + 18 if marks else y
