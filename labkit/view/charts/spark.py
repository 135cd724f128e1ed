"""Draws a curve in the space of a word, as text and as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.view.charts.svg import COLOURS, DASHES

__all__ = ["spark_svg", "spark_text"]

SPARKS = "▁▂▃▄▅▆▇█"
CELLS = 24
WIDTH, HEIGHT, POINTS = 96, 20, 32


def spark_text(values: Sequence[float]) -> str:
    """At most 24 characters, scaled from the minimum to the maximum; a spike within a character is kept."""
    group = -(-len(values) // CELLS) or 1
    tops = [max(values[i : i + group]) for i in range(0, len(values), group)]
    return "".join(SPARKS[round(height * (len(SPARKS) - 1))] for height in _scaled(tops))


def spark_svg(values: Sequence[float], line: int | None = 0) -> str:
    """Drawn in the style of a chart's `line`, or in grey; empty without values."""
    group = -(-len(values) // POINTS) or 1
    heights = _scaled(values[group - 1 :: group])
    step = (WIDTH - 2) / max(1, len(heights) - 1)
    points = " ".join(f"{1 + i * step:.0f} {HEIGHT - 2 - (HEIGHT - 4) * y:.1f}" for i, y in enumerate(heights))
    if not points:
        return ""
    colour, dash = ("#8b949e", "") if line is None else (COLOURS[line % len(COLOURS)], DASHES[line % len(DASHES)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="from {values[0]:.4g} to {values[-1]:.4g}"><path d="M{points}" fill="none" '
        f'stroke="{colour}" stroke-width="1.4" stroke-dasharray="{dash}"/></svg>'
    )


def _scaled(values: Sequence[float]) -> list[float]:
    """The values scaled to 0 for the lowest and 1 for the highest."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return [(value - low) / ((high - low) or 1.0) for value in values]
