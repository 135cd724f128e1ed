"""Draws what fills the memory of a rank in the course of a training step."""

from __future__ import annotations

from labkit.view import Palette
from labkit_labs.draw.picture import GREY, WIDTH, Picture, sheet, words

__all__ = ["step"]

LEFT, TOP, TALL = 8.0, 40.0, 150.0
PHASES = (("forward", 0.0, 0.32), ("backward", 0.32, 0.84), ("optimizer", 0.84, 1.0))


def step(
    parameters: float,
    gradients: float,
    optimizer: float,
    activations: float,
    unit: str = "",
    *,
    top: float = 0.0,
    limit: float = 0.0,
    limit_name: str = "",
) -> Picture:
    """Activations grow in forward and shrink in backward, while gradients appear. Parameters and the optimizer's state
    are there all the time. All have the same unit, including `top`, the end of the axis, and `limit`, a line."""
    highest = top or parameters + optimizer + max(activations, gradients) or 1.0
    flat = [(0.0, 1.0), (1.0, 1.0)]
    layers = (
        ("parameters", parameters, flat),
        ("optimizer", optimizer, flat),
        ("gradients", gradients, [(0.0, 0.0), (0.32, 0.0), (0.84, 1.0), (1.0, 1.0)]),
        ("activations", activations, [(0.0, 0.0), (0.32, 1.0), (0.84, 0.0), (1.0, 0.0)]),
    )
    times = (0.0, 0.32, 0.84, 1.0)
    below, drawn, x = dict.fromkeys(times, 0.0), "", LEFT
    for name, size, course in layers:
        shares = dict(course)
        above = {time: below[time] + size * shares.get(time, 1.0) for time in times}
        there = " ".join(f"{_x(time):.0f},{_y(above[time], highest):.1f}" for time in times)
        back = " ".join(f"{_x(time):.0f},{_y(below[time], highest):.1f}" for time in reversed(times))
        drawn += f'<polygon points="{there} {back}" fill="{Palette.MEMORY[name]}" fill-opacity=".85"/>'
        label = f"{name} {size:.3g} {unit}".strip()
        drawn += f'<rect x="{x:.0f}" y="4" width="11" height="11" fill="{Palette.MEMORY[name]}"/>'
        drawn += words(x + 15, 14, label, size=12)
        x += 32 + 6.6 * len(label)
        below = above
    for phase, begin, end in PHASES:
        drawn += words((_x(begin) + _x(end)) / 2, TOP + TALL + 18, phase, anchor="middle", size=12)
        drawn += f'<path d="M{_x(end):.0f} {TOP}V{TOP + TALL + 6}" stroke="{GREY}" stroke-dasharray="3 3"/>'
    peak = max(below.values())
    at = min(_x(time) for time, size in below.items() if size == peak)
    drawn += f'<circle cx="{at:.0f}" cy="{_y(peak, highest):.1f}" r="3"/>'
    drawn += words(at + 6, _y(peak, highest) - 5, f"peak {peak:.3g} {unit}".strip(), bold=True)
    if 0 < limit <= highest:
        y = _y(limit, highest)
        lines = f"M{LEFT} {y:.1f}H{WIDTH - LEFT}M{x:.0f} 10h22"  # the second one is in the legend
        drawn += f'<path d="{lines}" stroke="{Palette.LIMIT}" stroke-width="1.5" stroke-dasharray="5 3"/>'
        drawn += words(x + 27, 14, f"{limit_name} {limit:.3g} {unit}".strip(), size=12)
    return sheet(
        [drawn], TOP + TALL + 26,
        f"a step: {parameters:.3g} {unit} parameters, {optimizer:.3g} optimizer, {gradients:.3g} gradients, "
        f"{activations:.3g} activations, at most {peak:.3g} together",
    )  # fmt: skip


def _x(time: float) -> float:
    return LEFT + time * (WIDTH - 2 * LEFT)


def _y(size: float, highest: float) -> float:
    return TOP + TALL * (1 - size / highest)
