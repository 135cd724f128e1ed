"""Draws measured and predicted numbers, formats of numbers, and the cells of a script."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import Any

from labkit.charts import Bar, Bars, Chart, Points
from labkit.errors import LabError
from labkit.text import gib
from labkit.words import quantity
from labkit_labs.claims import amount
from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, colour_of, drawn, key, sheet, words

__all__ = ["FORMATS", "Quantity", "bars", "cells", "choice", "curves", "exponents", "formats", "gradients"]

Quantity = float | Mapping[str, float]  # in all, or by category


def bars(
    measured: Mapping[str, Quantity] | None = None,
    predicted: Mapping[str, Quantity] | None = None,
    *,
    unit: str = "",
    title: str = "",
    limit: float | None = None,
    limit_name: str = "",
) -> Picture:
    """Draws a group of bars for each name: predicted (paler), then measured, in the same colours. `limit`, in the same
    unit, is a line."""
    measured, predicted = measured or {}, predicted or {}
    rows = []
    for name in dict.fromkeys([*predicted, *measured]):
        for source, of_source in (("predicted", predicted), ("measured", measured)):
            if name in of_source:
                size = of_source[name]
                rows.append(Bar(name, size if isinstance(size, Mapping) else {title or "all": size}, source=source))
    return drawn(Bars(rows, limit, limit_name, lambda number: _shown(number, unit), title))


def _shown(number: float, unit: str) -> str:
    """Rounded, so that bytes of all bars have units of the same kind."""
    return gib(number) if unit == "B" else amount(number, unit)


def curves(
    lines: Mapping[str, Iterable[tuple[float, float]]],
    title: str = "",
    *,
    log: bool = False,
    stairs: bool = False,
    over: str = "step",
    marks: Mapping[float, str] | None = None,
    ranges: Mapping[str, Iterable[tuple[float, float, float]]] | None = None,
) -> Picture:
    """Draws numbers by step, or `over` something else, as lines. `lines` are pairs of a step and a number; numbers that
    are not finite are left out. `marks` are texts at steps, and `log` makes the scale of the numbers logarithmic. With
    `stairs` a number stays until the next one. `ranges` has for some lines a step, and the lowest and the highest
    number there."""
    between = {name: {x: both for x, *both in band} for name, band in (ranges or {}).items()}
    series = {}
    for number, (name, line) in enumerate(lines.items()):
        kept = [(x, y) for x, y in line if math.isfinite(y) and (y > 0 or not log)]
        if stairs:
            kept = [*kept[:1], *(corner for (_, y), (x, new) in pairwise(kept) for corner in ((x, y), (x, new)))]
        series[number] = Points([(x, *between.get(name, {}).get(x, (y, y)), y) for x, y in kept])
    if not any(line.points() for line in series.values()):
        found = f"in {', '.join(lines)}" if lines else "without lines"
        raise LabError(f"there is no finite number{' above 0' if log else ''} to draw {found}")
    return drawn(
        Chart(
            title,
            series,
            quantity,
            over=over,
            changes=tuple((marks or {}).items()),
            from_zero=False,
            log=log,
            label=[*lines].__getitem__,
            legend=len(lines) > 1,
        )
    )


def speedups(lines: Mapping[str, Iterable[tuple[float, float]]], title: str = "speed-up over ranks") -> Picture:
    """Draws pairs of a number of ranks and a speed-up as lines, by name; the dotted line is linear scaling."""
    points = {name: [(x, y, y, y) for x, y in line] for name, line in lines.items()}
    return drawn(Chart.over_ranks(title, points, "times as fast as one rank", log=True))


FORMATS = {"fp32": (8, 23), "bf16": (8, 7), "fp16": (5, 10)}  # bits of exponent and fraction
FULL, FEWER, LOST = colour_of(2), colour_of(4), colour_of(5)
FORMATS_KEY = ((FULL, "all digits"), (FEWER, "fewer digits (subnormal)"), (LOST, "zero or infinite"))
FORMATS_LEFT = 62.0
SHOWN = -150, 130  # exponents


def formats() -> Picture:
    """Draws how far the numbers of each floating-point format reach, green with all of its digits and yellow with fewer
    (subnormal numbers), and below it how many digits they have."""
    below = 62 + 26 * len(FORMATS)
    drawn = words(0, 12, "how far the numbers reach", bold=True) + key(FORMATS_KEY[:2], FORMATS_LEFT + 160, 12)
    drawn += words(0, below + 12, "how many digits they have", bold=True)
    longest, label = max(fraction for _, fraction in FORMATS.values()) + 1, []
    for row, (name, (exponent, fraction)) in enumerate(FORMATS.items()):
        y, (low, normal, high) = 22 + 26 * row, _borders(exponent, fraction)
        drawn += words(0, y + 14, name) + _ranges_of_format(low, normal, high, y, 18, *SHOWN)
        bits, y = fraction + 1, below + y
        wide = (WIDTH - FORMATS_LEFT - 200) * bits / longest
        digits = f"{bits} bits, {bits * math.log10(2):.1f} decimal digits"
        drawn += words(0, y + 14, name) + box(FORMATS_LEFT, y, wide, 18, colour_of(0), round=0)
        drawn += words(FORMATS_LEFT + wide + 8, y + 14, digits)
        label.append(f"{name} from 2^{low} to 2^{high} with {digits}")
    axis = _axis_of_exponents(22 + 26 * len(FORMATS), *SHOWN, 25)
    return sheet([drawn, axis], below + 22 + 26 * len(FORMATS), "; ".join(label))


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
    drawn += _ranges_of_format(low, normal, high, 140, 10, first, last)
    title = f"scale 2^{shift}: {lost:.3%} lost, {fewer:.1%} with fewer digits"
    drawn += words(0, 14, title, bold=True) + words(0, 149, "fp16", bold=True)
    return sheet([drawn, _axis_of_exponents(150, first, last, 10), key(FORMATS_KEY, FORMATS_LEFT, 186)], 196, title)


def _borders(exponent_bits: int, fraction_bits: int) -> tuple[int, int, int]:
    """The exponents of 2 of the smallest number, of the smallest with all digits, and of the one where infinity
    begins."""
    bias = 2 ** (exponent_bits - 1) - 1
    return 1 - bias - fraction_bits, 1 - bias, bias + 1


def _ranges_of_format(low: int, normal: int, high: int, y: float, tall: float, first: int, last: int) -> str:
    """Boxes from border to border: numbers with fewer digits, then those with all."""
    left, middle, right = (_x_of_exponent(border, first, last) for border in (low, normal, high))
    return box(left, y, middle - left, tall, FEWER, round=0) + box(middle, y, right - middle, tall, FULL, round=0)


def _x_of_exponent(exponent: float, first: int, last: int) -> float:
    return FORMATS_LEFT + (min(max(exponent, first), last) - first) * (WIDTH - FORMATS_LEFT - 8) / (last - first)


def _axis_of_exponents(y: float, first: int, last: int, every: int) -> str:
    ticks = range(-(-first // every) * every, last, every)
    line = f'<path d="M{FORMATS_LEFT} {y + 3}H{WIDTH - 8}" stroke="{GREY}"/>'
    return line + "".join(
        words(_x_of_exponent(at, first, last), y + 17, f"2^{at}", anchor="middle", size=11) for at in ticks
    )


MAP_LEFT, MAP_TOP, MAP_WIDE, MAP_TALL = 70.0, 26.0, 500.0, 230.0
Places = Mapping[str, tuple[float, float]]  # bytes sent by all ranks in a step, bytes held by a rank at its peak


def choice(
    predicted: Places, measured: Places | None = None, *, rings: str = "predicted", crosses: str = "measured"
) -> Picture:
    """Draws strategies on a map: rings are predicted, crosses measured, and the legend says how. To the left less is
    sent, further down less is held."""
    measured = measured or {}
    every = [*predicted.values(), *measured.values()]
    right, top = (1.15 * max(each[axis] for each in every) or 1.0 for axis in (0, 1))
    drawn = f'<path d="M{MAP_LEFT} {MAP_TOP}V{MAP_TOP + MAP_TALL}H{MAP_LEFT + MAP_WIDE}" stroke="{GREY}" fill="none"/>'
    drawn += words(MAP_LEFT, MAP_TOP - 10, "held by a rank at its peak", size=12)
    legend = f"○ {rings}" + (f" · × {crosses}" if measured else "")
    drawn += words(WIDTH - 10, MAP_TOP - 10, legend, anchor="end", size=12)
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
    parts = [key([(colour_of(number), kind) for number, kind in enumerate(marked)], 0, 15)]
    for place, title in enumerate(titles):
        x, y = place % CELLS_ACROSS * wide, 28 + place // CELLS_ACROSS * (CELL_TALL + 8)
        colour = colour_of(kinds[title]) if title in kinds else ""
        parts.append(box(x, y, wide - 10, CELL_TALL, colour or "none", line="" if colour else GREY, round=6))
        parts.append(words(x + wide / 2 - 5, y + 22, title, anchor="middle", fill="#fff" if colour else ""))
    rows = -(-len(titles) // CELLS_ACROSS)
    label = "; ".join(f"{kind}: {', '.join(sorted(of_kind))}" for kind, of_kind in marked.items())
    return sheet(parts, 28 + rows * (CELL_TALL + 8), f"a script of {len(titles)} cells; {label}")
