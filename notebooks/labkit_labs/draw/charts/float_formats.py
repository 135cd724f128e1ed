"""Draws floating-point formats on a scale of powers of two, and gradients above them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, colour_of, sheet, words

__all__ = ["FORMATS", "exponents", "formats", "gradients", "limits"]

FORMATS = {"fp32": (8, 23), "bf16": (8, 7), "fp16": (5, 10)}  # bits of exponent and fraction
FULL, FEWER, LOST = colour_of(2), colour_of(4), colour_of(5)
KEY = ((FULL, "all digits"), (FEWER, "fewer digits (subnormal)"), (LOST, "zero or infinite"))
LEFT = 62.0


def limits(exponent_bits: int, fraction_bits: int) -> tuple[float, float, float]:
    """(largest, smallest above 0, distance from 1 to the next) of a format in the manner of IEEE 754."""
    bias = 2 ** (exponent_bits - 1) - 1
    return (2 - 2.0**-fraction_bits) * 2.0**bias, 2.0 ** (1 - bias - fraction_bits), 2.0**-fraction_bits


def formats() -> Picture:
    """What each format can hold: green with all of its digits, yellow with fewer (subnormal numbers)."""
    drawn, label = _key(56 + 26 * len(FORMATS), KEY[:2]), []
    for row, (name, (exponent, fraction)) in enumerate(FORMATS.items()):
        y, (low, normal, high) = 22 + 26 * row, _borders(exponent, fraction)
        drawn += words(0, y + 14, name, bold=True)
        drawn += box(_x(low, -150, 130), y, _x(normal, -150, 130) - _x(low, -150, 130), 18, FEWER, round=0)
        drawn += box(_x(normal, -150, 130), y, _x(high, -150, 130) - _x(normal, -150, 130), 18, FULL, round=0)
        drawn += words(_x(0, -150, 130), y + 13, f"{fraction + 1} bits", anchor="middle", size=12, fill="#fff")
        label.append(f"{name} from 2^{low} to 2^{high} with {fraction + 1} bits")
    return sheet([drawn, _axis(22 + 26 * len(FORMATS), -150, 130, 25)], 64 + 26 * len(FORMATS), "; ".join(label))


def exponents(numbers: Any) -> dict[int, float]:
    """For each exponent of 2, the share of a tensor's numbers above zero that have it."""
    exponents, counts = (numbers[numbers > 0].frexp().exponent - 1).unique(return_counts=True)
    return dict(zip(exponents.tolist(), (counts / counts.sum()).tolist(), strict=True))


def gradients(shares: Mapping[int, float], scale: float = 1) -> Picture:
    """`shares` of all gradients by exponent of 2, multiplied by `scale` and kept in fp16: red is lost."""
    low, normal, high = _borders(*FORMATS["fp16"])
    shift, first, last = round(math.log2(scale)), min(-40, *shares), 30
    wide, tall = (WIDTH - LEFT - 8) / (last - first), 110 / max(shares.values())
    drawn, lost, fewer = "", 0.0, 0.0
    for exponent, share in shares.items():
        there = exponent + shift
        colour = LOST if there < low - 1 or there >= high else FEWER if there < normal else colour_of(0)
        lost, fewer = lost + share * (colour == LOST), fewer + share * (colour == FEWER)
        drawn += box(_x(there, first, last), 136 - share * tall, wide - 1, share * tall, colour, round=0)
    for begin, end, colour in ((low, normal, FEWER), (normal, high, FULL)):
        drawn += box(_x(begin, first, last), 140, _x(end, first, last) - _x(begin, first, last), 10, colour, round=0)
    title = f"scale {scale:,.0f}: {lost:.3%} lost, {fewer:.1%} with fewer digits"
    drawn += words(0, 14, title, bold=True) + words(0, 149, "fp16", bold=True)
    return sheet([drawn, _axis(150, first, last, 10), _key(186, KEY)], 196, title)


def _borders(exponent_bits: int, fraction_bits: int) -> tuple[int, int, int]:
    """The exponents of 2 of the smallest number, of the smallest with all digits, and of the one where infinity
    begins."""
    bias = 2 ** (exponent_bits - 1) - 1
    return 1 - bias - fraction_bits, 1 - bias, bias + 1


def _x(exponent: float, first: int, last: int) -> float:
    return LEFT + (min(max(exponent, first), last) - first) * (WIDTH - LEFT - 8) / (last - first)


def _axis(y: float, first: int, last: int, every: int) -> str:
    ticks = range(-(-first // every) * every, last, every)
    line = f'<path d="M{LEFT} {y + 3}H{WIDTH - 8}" stroke="{GREY}"/>'
    return line + "".join(words(_x(at, first, last), y + 17, f"2^{at}", anchor="middle", size=11) for at in ticks)


def _key(y: float, marks: Sequence[tuple[str, str]]) -> str:
    drawn, x = "", LEFT
    for colour, text in marks:
        drawn += box(x, y - 9, 10, 10, colour) + words(x + 14, y, text, size=12)
        x += 34 + 6.6 * len(text)
    return drawn
