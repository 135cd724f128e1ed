"""Draws a step's spans as SVG text, for saved notebooks and front ends without plotly."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from labkit.record import COMMUNICATION, Span
from labkit.text import escaped
from labkit.view.charts.timeline_figures import IDLE, KIND_COLOURS

__all__ = ["picture"]

WIDTH, LEFT, ROW, TOP = 760, 60, 34, 36
THIN, THICK = 5, 16
SMALLEST = 0.3  # pixels


def picture(spans: Sequence[Span], ranks: Sequence[int], title: str) -> str:
    """Each rank's computation, with its communication below; a pipeline's bubbles are grey."""
    end = max((span.end for span in spans), default=0.0) or 1.0
    scale = (WIDTH - LEFT - 8) / end
    rows = {rank: TOP + ROW * i for i, rank in enumerate(ranks)}
    drawn = "".join(f'<text x="0" y="{y + 12}">rank {rank}</text>' for rank, y in rows.items())
    if chunks := [span for span in spans if span.chunk is not None]:
        first, last = min(s.start for s in chunks), max(s.end for s in chunks)
        drawn += "".join(_bar(LEFT + first * scale, y, (last - first) * scale, THICK, IDLE) for y in rows.values())
    bars: dict[str, str] = defaultdict(str)  # one path for each colour: a notebook stores every picture
    numbers = ""
    for span in spans:
        width = span.seconds * scale
        if width < SMALLEST:
            continue
        x, y = LEFT + span.start * scale, rows[span.rank]
        talks = span.kind in COMMUNICATION
        top, height = (y + THICK + 2, THIN) if talks else (y, THICK)
        width = max(width / 2, width - 1) if talks else width  # a gap, or successive collectives would look like one
        bars[KIND_COLOURS[span.kind]] += f"M{x:.1f} {top}h{width:.1f}v{height}h-{width:.1f}z"
        if span.chunk is not None and width > 9:
            numbers += (
                f'<text x="{x + width / 2:.1f}" y="{y + 12}" text-anchor="middle" fill="#000">{span.chunk}</text>'
            )
    drawn += "".join(f'<path d="{path}" fill="{colour}"/>' for colour, path in bars.items()) + numbers
    bottom = TOP + ROW * len(ranks)
    power = 10.0 ** math.floor(math.log10(end / 2))
    tick = max(power * factor for factor in (1, 2, 5) if power * factor <= end / 2)  # two to four of them
    axis = "".join(
        f'<text x="{LEFT + tick * i * scale:.0f}" y="{bottom + 8}" text-anchor="middle" opacity=".7">'
        f"{tick * i * 1e3:.4g} ms</text>"
        for i in range(math.floor(end / tick) + 1)
        if LEFT + tick * i * scale < WIDTH - LEFT / 2
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 14}" role="img" '
        f'aria-label="{escaped(title)}" style="width:100%;max-width:{WIDTH}px;height:auto" '
        f'font-family="system-ui,sans-serif" font-size="10" fill="currentColor"><text y="11">{escaped(title)}</text>'
        f"{_key(spans)}{drawn}{axis}</svg>"
    )


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _key(spans: Sequence[Span]) -> str:
    kinds = {span.kind for span in spans}
    drawn, x = "", float(LEFT)
    for kind in (kind for kind in KIND_COLOURS if kind in kinds):
        name = kind.replace("_", "-")
        drawn += _bar(x, 18, 9, 9, KIND_COLOURS[kind]) + f'<text x="{x + 13}" y="26">{name}</text>'
        x += 24 + 5.6 * len(name)
    return drawn
