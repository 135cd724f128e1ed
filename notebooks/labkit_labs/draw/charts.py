"""Draws measured and predicted numbers, formats of numbers, and the cells of a script."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

from labkit.charts import Palette
from labkit.text import gib
from labkit_labs.claims import amount
from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, colour_of, sheet, words

__all__ = ["FORMATS", "Quantity", "bars", "cells", "choice", "curves", "exponents", "formats", "gradients", "limits"]

Quantity = float | Mapping[str, float]  # in all, or by category
BARS_RIGHT, BAR_TALL = 104, 16
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
    """Draws a group of bars for each name: predicted (hatched), then measured (full), in the same color. `limit`, in
    the same unit, is a line."""
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
    scale = (WIDTH - left - BARS_RIGHT) / longest
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
            drawn.append(box(x, y, value * scale, BAR_TALL, colour, opacity=0.45 if how == "predicted" else 1, round=0))
            x += max(0.0, value * scale)
        if how == "predicted":
            drawn.append(box(left, y, x - left, BAR_TALL, "url(#hatch)", round=0, line=GREY, opacity=0.5))
        number = _shown(sum(parts.values()), unit)
        if limit and x < left + limit * scale < x + 12 + 7 * len(number):
            x = left + limit * scale
        drawn.append(words(x + 6, y + 13, number, size=12))
        y, before = y + BAR_TALL + 2, name
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


CURVES_LEFT, CURVES_HEAD, CURVES_TALL, LETTER = 52.0, 44.0, 170.0, 6.0
CURVES_WIDE = WIDTH - CURVES_LEFT - 8


def curves(
    lines: Mapping[str, Iterable[tuple[float, float]]],
    title: str = "",
    *,
    log: bool = False,
    marks: Mapping[float, str] | None = None,
    ranges: Mapping[str, Iterable[tuple[float, float, float]]] | None = None,
) -> Picture:
    """Draws numbers by step as lines, each thinner than the one below it, so that equal ones are visible. `lines` are
    pairs of a step and a number; numbers that are not finite are left out. `marks` are texts at steps, and `log` makes
    the scale of the numbers logarithmic. `ranges` has for some lines a step, and the lowest and the highest number
    there."""
    kept = {name: [(x, y) for x, y in line if math.isfinite(y) and (y > 0 or not log)] for name, line in lines.items()}
    bands = {name: [*band] for name, band in (ranges or {}).items()}
    steps = [x for line in kept.values() for x, _ in line]
    heights = [y for line in kept.values() for _, y in line]
    heights += [y for band in bands.values() for _, *both in band for y in both]
    numbers = [math.log10(y) if log else y for y in heights]
    if not steps:
        raise ValueError("there is no finite number to draw")
    first, last, low, high = min(steps), max(steps), min(numbers), max(numbers)

    def across(step: float) -> float:
        return CURVES_LEFT + (step - first) / ((last - first) or 1.0) * CURVES_WIDE

    marked, top = _marked({across(step): text for step, text in (marks or {}).items()})

    def place(x: float, y: float) -> tuple[float, float]:
        height = ((math.log10(y) if log else y) - low) / ((high - low) or 1.0)
        return across(x), top + (1 - height) * CURVES_TALL

    drawn = [
        words(0, 15, title, bold=True),
        box(CURVES_LEFT, top, CURVES_WIDE, CURVES_TALL, line=GREY, round=0),
        marked,
    ]
    for value, y in ((high, top + 10), (low, top + CURVES_TALL)):
        number = 10**value if log else value
        drawn.append(
            words(CURVES_LEFT - 6, y, f"{number:,.0f}" if number >= 1000 else f"{number:.3g}", anchor="end", size=11)
        )
    for step, anchor in ((first, "start"), (last, "end")):
        x = CURVES_LEFT if anchor == "start" else WIDTH - 8
        drawn.append(words(x, top + CURVES_TALL + 16, f"step {step:g}", anchor=anchor, size=11))
    left, thinner = 0.0, min(2.5, 7.5 / max(1, len(kept) - 1))
    for number, (name, line) in enumerate(kept.items()):
        colour, wide = colour_of(number), 2 + thinner * (len(kept) - 1 - number) if not bands else 2.5
        band = bands.get(name, [])
        edge = [place(x, y) for x, y, _ in band] + [place(x, y) for x, _, y in reversed(band)]
        if edge:
            outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
            drawn.append(f'<polygon points="{outline}" fill="{colour}" fill-opacity="0.2"/>')
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{wide}"/>')
        drawn.append(box(left, 24, 14, 6, colour) + words(left + 19, 32, name, size=12))
        left += 36 + 7 * len(name)
    seen = ", ".join(f"{name} ends at {line[-1][1]:.4g}" for name, line in kept.items() if line)
    return sheet(drawn, top + CURVES_TALL + 22, f"{title}: {seen}" if title else seen)


def _marked(texts: Mapping[float, str]) -> tuple[str, float]:
    """At each x a dashed line through the plot, and above the plot its text, which no line crosses; the plot's top."""
    ends: list[float] = []  # of the last text in each row
    placed = []
    for x, text in sorted(texts.items()):
        row = next((row for row in range(len(ends)) if max(ends[row:]) < x), len(ends))
        left = min(x, WIDTH - LETTER * len(text))
        ends[row : row + 1] = [left + LETTER * len(text) + 6]
        placed.append((x, left, CURVES_HEAD + 15 * row, text))
    top = CURVES_HEAD + 15 * len(ends)
    drawn = "".join(
        words(left, y + 4, text, size=11)
        + f'<path d="M{x:.1f} {y + 8}V{top + CURVES_TALL}" stroke="{GREY}" stroke-dasharray="4 3"/>'
        for x, left, y, text in placed
    )
    return drawn, top


FORMATS = {"fp32": (8, 23), "bf16": (8, 7), "fp16": (5, 10)}  # bits of exponent and fraction
FULL, FEWER, LOST = colour_of(2), colour_of(4), colour_of(5)
FORMATS_KEY = ((FULL, "all digits"), (FEWER, "fewer digits (subnormal)"), (LOST, "zero or infinite"))
FORMATS_LEFT = 62.0


def limits(exponent_bits: int, fraction_bits: int) -> tuple[float, float, float]:
    """(largest, smallest above 0, distance from 1 to the next) of a format in the manner of IEEE 754."""
    bias = 2 ** (exponent_bits - 1) - 1
    return (2 - 2.0**-fraction_bits) * 2.0**bias, 2.0 ** (1 - bias - fraction_bits), 2.0**-fraction_bits


def formats() -> Picture:
    """Draws what each floating-point format can hold: green with all of its digits, yellow with fewer (subnormal
    numbers)."""
    drawn, label = _key_of_formats(56 + 26 * len(FORMATS), FORMATS_KEY[:2]), []
    for row, (name, (exponent, fraction)) in enumerate(FORMATS.items()):
        y, (low, normal, high) = 22 + 26 * row, _borders(exponent, fraction)
        drawn += words(0, y + 14, name, bold=True)
        drawn += box(
            _x_of_exponent(low, -150, 130),
            y,
            _x_of_exponent(normal, -150, 130) - _x_of_exponent(low, -150, 130),
            18,
            FEWER,
            round=0,
        )
        drawn += box(
            _x_of_exponent(normal, -150, 130),
            y,
            _x_of_exponent(high, -150, 130) - _x_of_exponent(normal, -150, 130),
            18,
            FULL,
            round=0,
        )
        drawn += words(
            _x_of_exponent(0, -150, 130), y + 13, f"{fraction + 1} bits", anchor="middle", size=12, fill="#fff"
        )
        label.append(f"{name} from 2^{low} to 2^{high} with {fraction + 1} bits")
    return sheet(
        [drawn, _axis_of_exponents(22 + 26 * len(FORMATS), -150, 130, 25)], 64 + 26 * len(FORMATS), "; ".join(label)
    )


def exponents(numbers: Any) -> dict[int, float]:
    """For each exponent of 2, the share of a tensor's numbers above zero that have it."""
    exponents, counts = (numbers[numbers > 0].frexp().exponent - 1).unique(return_counts=True)
    return dict(zip(exponents.tolist(), (counts / counts.sum()).tolist(), strict=True))


def gradients(shares: Mapping[int, float], scale: float = 1) -> Picture:
    """Draws the `shares` of all gradients by exponent of 2, multiplied by `scale` and stored in fp16; red is lost."""
    low, normal, high = _borders(*FORMATS["fp16"])
    shift, first, last = round(math.log2(scale)), min(-40, *shares), 30
    wide, tall = (WIDTH - FORMATS_LEFT - 8) / (last - first), 110 / max(shares.values())
    drawn, lost, fewer = "", 0.0, 0.0
    for exponent, share in shares.items():
        there = exponent + shift
        colour = LOST if there < low - 1 or there >= high else FEWER if there < normal else colour_of(0)
        lost, fewer = lost + share * (colour == LOST), fewer + share * (colour == FEWER)
        drawn += box(_x_of_exponent(there, first, last), 136 - share * tall, wide - 1, share * tall, colour, round=0)
    for begin, end, colour in ((low, normal, FEWER), (normal, high, FULL)):
        drawn += box(
            _x_of_exponent(begin, first, last),
            140,
            _x_of_exponent(end, first, last) - _x_of_exponent(begin, first, last),
            10,
            colour,
            round=0,
        )
    title = f"scale {scale:,.0f}: {lost:.3%} lost, {fewer:.1%} with fewer digits"
    drawn += words(0, 14, title, bold=True) + words(0, 149, "fp16", bold=True)
    return sheet([drawn, _axis_of_exponents(150, first, last, 10), _key_of_formats(186, FORMATS_KEY)], 196, title)


def _borders(exponent_bits: int, fraction_bits: int) -> tuple[int, int, int]:
    """The exponents of 2 of the smallest number, of the smallest with all digits, and of the one where infinity
    begins."""
    bias = 2 ** (exponent_bits - 1) - 1
    return 1 - bias - fraction_bits, 1 - bias, bias + 1


def _x_of_exponent(exponent: float, first: int, last: int) -> float:
    return FORMATS_LEFT + (min(max(exponent, first), last) - first) * (WIDTH - FORMATS_LEFT - 8) / (last - first)


def _axis_of_exponents(y: float, first: int, last: int, every: int) -> str:
    ticks = range(-(-first // every) * every, last, every)
    line = f'<path d="M{FORMATS_LEFT} {y + 3}H{WIDTH - 8}" stroke="{GREY}"/>'
    return line + "".join(
        words(_x_of_exponent(at, first, last), y + 17, f"2^{at}", anchor="middle", size=11) for at in ticks
    )


def _key_of_formats(y: float, marks: Sequence[tuple[str, str]]) -> str:
    drawn, x = "", FORMATS_LEFT
    for colour, text in marks:
        drawn += box(x, y - 9, 10, 10, colour) + words(x + 14, y, text, size=12)
        x += 34 + 6.6 * len(text)
    return drawn


MAP_LEFT, MAP_TOP, MAP_WIDE, MAP_TALL = 70.0, 26.0, 500.0, 230.0
Places = Mapping[str, tuple[float, float]]  # bytes sent by all ranks in a step, bytes held by a rank at its peak


def choice(predicted: Places, measured: Places | None = None) -> Picture:
    """Draws strategies on a map: rings are predicted, crosses measured. To the left less is sent, further down less is
    held."""
    measured = measured or {}
    every = [*predicted.values(), *measured.values()]
    right, top = (1.15 * max(each[axis] for each in every) or 1.0 for axis in (0, 1))
    drawn = f'<path d="M{MAP_LEFT} {MAP_TOP}V{MAP_TOP + MAP_TALL}H{MAP_LEFT + MAP_WIDE}" stroke="{GREY}" fill="none"/>'
    drawn += words(MAP_LEFT, MAP_TOP - 10, "held by a rank at its peak", size=12)
    drawn += words(MAP_LEFT + MAP_WIDE, MAP_TOP + MAP_TALL + 34, "sent by all ranks in a step", anchor="end", size=12)
    for share in (0.5, 1.0):
        y, x = MAP_TOP + MAP_TALL * (1 - share / 1.15), MAP_LEFT + MAP_WIDE * share / 1.15
        drawn += words(MAP_LEFT - 6, y + 4, amount(share * top / 1.15, "B"), anchor="end", size=11)
        drawn += words(x, MAP_TOP + MAP_TALL + 18, amount(share * right / 1.15, "B"), anchor="middle", size=11)
    for number, name in enumerate(dict.fromkeys([*predicted, *measured])):
        colour = colour_of(number)
        for places, ring in ((predicted, True), (measured, False)):
            if name in places:
                x, y = MAP_LEFT + MAP_WIDE * places[name][0] / right, MAP_TOP + MAP_TALL * (1 - places[name][1] / top)
                drawn += (
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="{colour}" stroke-width="2.5"/>'
                    + words(min(x + 14, WIDTH - 90), y + 4, name, fill=colour, bold=True)
                    if ring
                    else f'<path d="M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10" stroke="{colour}" stroke-width="2.5"/>'
                )
    plans = "; ".join(f"{name} sends {amount(s, 'B')} and holds {amount(h, 'B')}" for name, (s, h) in predicted.items())
    results = "; ".join(f"{name} {amount(s, 'B')} and {amount(h, 'B')}" for name, (s, h) in measured.items())
    return sheet(
        [drawn], MAP_TOP + MAP_TALL + 42, f"predicted: {plans}" + (f"; measured: {results}" if results else "")
    )


CELLS_ACROSS, CELL_TALL = 5, 34


def cells(titles: Collection[str], marked: Mapping[str, Collection[str]]) -> Picture:
    """Draws a box for each cell of a script, in order, by rows. `marked`: the titles of a kind, which get its color."""
    kinds = {title: number for number, of_kind in enumerate(marked.values()) for title in of_kind}
    wide = WIDTH / CELLS_ACROSS
    parts, left = [], 0.0
    for number, kind in enumerate(marked):
        parts.append(box(left, 5, 11, 11, colour_of(number)) + words(left + 16, 15, kind, size=12))
        left += 40 + 7 * len(kind)
    for place, title in enumerate(titles):
        x, y = place % CELLS_ACROSS * wide, 28 + place // CELLS_ACROSS * (CELL_TALL + 8)
        colour = colour_of(kinds[title]) if title in kinds else ""
        parts.append(box(x, y, wide - 10, CELL_TALL, colour or "none", line="" if colour else GREY, round=6))
        parts.append(words(x + wide / 2 - 5, y + 22, title, anchor="middle", fill="#fff" if colour else ""))
    rows = -(-len(titles) // CELLS_ACROSS)
    label = "; ".join(f"{kind}: {', '.join(sorted(of_kind))}" for kind, of_kind in marked.items())
    return sheet(parts, 28 + rows * (CELL_TALL + 8), f"a script of {len(titles)} cells; {label}")
