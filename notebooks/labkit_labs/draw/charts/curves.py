"""Draws numbers by step, as lines: each thinner than the one below it, so that equal ones are seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, colour_of, sheet, words

__all__ = ["curves"]

LEFT, HEAD, TALL, LETTER = 52.0, 44.0, 170.0, 6.0
ACROSS = WIDTH - LEFT - 8


def curves(
    lines: Mapping[str, Iterable[tuple[float, float]]],
    title: str = "",
    *,
    log: bool = False,
    marks: Mapping[float, str] | None = None,
    ranges: Mapping[str, Iterable[tuple[float, float, float]]] | None = None,
) -> Picture:
    """`lines` are pairs of a step and a number; what is not finite is left out. `marks` are texts at steps, and `log`
    makes the scale of the numbers logarithmic. `ranges` has for some lines a step, and the lowest and the highest
    number there."""
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
        return LEFT + (step - first) / ((last - first) or 1.0) * ACROSS

    marked, top = _marked({across(step): text for step, text in (marks or {}).items()})

    def place(x: float, y: float) -> tuple[float, float]:
        height = ((math.log10(y) if log else y) - low) / ((high - low) or 1.0)
        return across(x), top + (1 - height) * TALL

    drawn = [words(0, 15, title, bold=True), box(LEFT, top, ACROSS, TALL, line=GREY, round=0), marked]
    for value, y in ((high, top + 10), (low, top + TALL)):
        number = 10**value if log else value
        drawn.append(words(LEFT - 6, y, f"{number:,.0f}" if number >= 1000 else f"{number:.3g}", anchor="end", size=11))
    for step, anchor in ((first, "start"), (last, "end")):
        x = LEFT if anchor == "start" else WIDTH - 8
        drawn.append(words(x, top + TALL + 16, f"step {step:g}", anchor=anchor, size=11))
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
    return sheet(drawn, top + TALL + 22, f"{title}: {seen}" if title else seen)


def _marked(texts: Mapping[float, str]) -> tuple[str, float]:
    """At each x a dashed line through the plot, and above the plot its text, which no line crosses; the plot's top."""
    ends: list[float] = []  # of the last text in each row
    placed = []
    for x, text in sorted(texts.items()):
        row = next((row for row in range(len(ends)) if max(ends[row:]) < x), len(ends))
        left = min(x, WIDTH - LETTER * len(text))
        ends[row : row + 1] = [left + LETTER * len(text) + 6]
        placed.append((x, left, HEAD + 15 * row, text))
    top = HEAD + 15 * len(ends)
    drawn = "".join(
        words(left, y + 4, text, size=11)
        + f'<path d="M{x:.1f} {y + 8}V{top + TALL}" stroke="{GREY}" stroke-dasharray="4 3"/>'
        for x, left, y, text in placed
    )
    return drawn, top
