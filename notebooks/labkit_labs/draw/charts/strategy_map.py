"""Draws strategies on a map: what a rank holds, and what is sent."""

from __future__ import annotations

from collections.abc import Mapping

from labkit_labs.claims import amount
from labkit_labs.draw.picture import GREY, WIDTH, Picture, colour_of, sheet, words

__all__ = ["choice"]

LEFT, TOP, WIDE, TALL = 70.0, 26.0, 500.0, 230.0
Places = Mapping[str, tuple[float, float]]  # bytes sent by all ranks in a step, bytes held by a rank at its peak


def choice(predicted: Places, measured: Places | None = None) -> Picture:
    """Rings are predicted, crosses measured. To the left less is sent, further down less is held."""
    measured = measured or {}
    every = [*predicted.values(), *measured.values()]
    right, top = (1.15 * max(each[axis] for each in every) or 1.0 for axis in (0, 1))
    drawn = f'<path d="M{LEFT} {TOP}V{TOP + TALL}H{LEFT + WIDE}" stroke="{GREY}" fill="none"/>'
    drawn += words(LEFT, TOP - 10, "held by a rank at its peak", size=12)
    drawn += words(LEFT + WIDE, TOP + TALL + 34, "sent by all ranks in a step", anchor="end", size=12)
    for share in (0.5, 1.0):
        y, x = TOP + TALL * (1 - share / 1.15), LEFT + WIDE * share / 1.15
        drawn += words(LEFT - 6, y + 4, amount(share * top / 1.15, "B"), anchor="end", size=11)
        drawn += words(x, TOP + TALL + 18, amount(share * right / 1.15, "B"), anchor="middle", size=11)
    for number, name in enumerate(dict.fromkeys([*predicted, *measured])):
        colour = colour_of(number)
        for places, ring in ((predicted, True), (measured, False)):
            if name in places:
                x, y = LEFT + WIDE * places[name][0] / right, TOP + TALL * (1 - places[name][1] / top)
                drawn += (
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="{colour}" stroke-width="2.5"/>'
                    + words(min(x + 14, WIDTH - 90), y + 4, name, fill=colour, bold=True)
                    if ring
                    else f'<path d="M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10" stroke="{colour}" stroke-width="2.5"/>'
                )
    plans = "; ".join(f"{name} sends {amount(s, 'B')} and holds {amount(h, 'B')}" for name, (s, h) in predicted.items())
    results = "; ".join(f"{name} {amount(s, 'B')} and {amount(h, 'B')}" for name, (s, h) in measured.items())
    return sheet([drawn], TOP + TALL + 42, f"predicted: {plans}" + (f"; measured: {results}" if results else ""))
