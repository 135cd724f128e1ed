"""Draws as SVG what each rank did in a step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from labkit.charts.axes import round_values
from labkit.charts.data import Lanes
from labkit.charts.images import Palette, Picture, legend, swatch
from labkit.spans import COMMUNICATION, Span
from labkit.text import escaped
from labkit.words import seconds

WIDTH, LEFT, RIGHT, TOP = 560, 52, 6, 16
STYLE = "width:100%;min-width:616px;max-width:760px;height:auto"  # or its text is too small
THIN, THICK = 11, 16
BELOW = 2  # lines for collectives, for those of one rank can overlap
SMALLEST = 0.3  # pixels
DIGIT = 6
IDLE = "rgba(139,148,158,.25)"
LATER = 0.6  # the opacity of a rank's second stage


def lanes_picture(drawn: Lanes, *, titled: bool = False) -> Picture:
    """`titled` gives every bar a title, and an element of its own."""
    spans, talks = drawn.spans, any(span.kind in COMMUNICATION for span in drawn.spans)
    end = drawn.end or max((span.end for span in spans), default=0.0) or 1.0
    collectives = numbered(spans)
    lines = 1 + max((line for _, line in collectives.values()), default=-1)
    scale, row = (WIDTH - LEFT - RIGHT) / end, THICK + 8 + lines * (THIN + 1) + talks
    key, top = legend(_in_legend(drawn), LEFT, TOP, WIDTH)
    rows = {rank: top + row * float(i) for i, rank in enumerate(drawn.names)}
    bars = ""
    if chunks := [span for span in spans if span.chunk is not None]:
        first, last = min(s.start for s in chunks), max(s.end for s in chunks)
        for y in rows.values():
            width = (last - first) * scale
            bars += f'<rect x="{LEFT + first * scale:.1f}" y="{y}" width="{width:.1f}" height="{THICK}" fill="{IDLE}"/>'
    later = later_stages(drawn)
    paths: dict[tuple[str, float], str] = defaultdict(str)  # one for each look: a notebook stores every picture
    numbers = ""
    for index, span in enumerate(spans):
        width = span.seconds * scale
        if width < SMALLEST:
            continue
        x, y = LEFT + span.start * scale, rows[span.rank]
        number, line = collectives.get(index, (span.chunk, -1))
        upper, height = (y, THICK) if line < 0 else (y + THICK + 2 + line * (THIN + 1), THIN)
        width = max(width / 2, width - 1)  # a gap, or successive ones would look like one
        shape = f"M{x:.1f} {upper}h{width:.1f}v{height}h-{width:.1f}z"
        look = Palette.SPANS[span.kind], LATER if (span.rank, span.stage) in later else 1.0
        if titled:
            bars += f'<path d="{shape}" fill="{look[0]}"{_faint(look[1])}><title>{escaped(said(span))}</title></path>'
        else:
            paths[look] += shape
        if number is not None and width > 2 + DIGIT * len(str(number)):
            middle = f'x="{x + width / 2:.1f}" y="{upper + height - (4 if line < 0 else 2)}"'
            numbers += f'<text {middle} text-anchor="middle" fill="#000">{number}</text>'
    bars += "".join(f'<path d="{path}" fill="{look[0]}"{_faint(look[1])}/>' for look, path in paths.items())
    bottom = top + row * len(rows)
    names = "".join(f'<text x="0" y="{y + 12}">{escaped(drawn.names[rank])}</text>' for rank, y in rows.items())
    axis = "".join(
        f'<text x="{LEFT + at * scale:.0f}" y="{bottom + 8}">{seconds(at)}</text>'
        for at in (round_values(0.0, end, 1.0, 4) if drawn.is_timed else ())
        if LEFT + at * scale < WIDTH - 20
    )
    body = (
        f'<text y="11" font-weight="600">{escaped(drawn.title)}</text>{key}{names}<g class="window"><g class="plot">'
        f'{bars}</g></g><g class="texts">{numbers}</g>'
        f'<g opacity=".75" text-anchor="middle" class="x" data-x="0 {end:.6g} {LEFT} {WIDTH - RIGHT}">{axis}</g>'
    )
    took = f"; {seconds(end)}" if drawn.is_timed else ""
    tall = bottom + (14 if drawn.is_timed else 0)
    label = f"{drawn.title}: {', '.join(_kinds(drawn))}{took}"
    return Picture(body, WIDTH, tall, label, style=STYLE)


def numbered(spans: Sequence[Span]) -> dict[int, tuple[int, int]]:
    """For the place in `spans` of every collective its number, counted from 1 by rank, step and kind, and its line
    below the computation: the first line on which it overlaps no earlier one, or the last line."""
    counts: dict[tuple[int, int, str], int] = defaultdict(int)
    free: dict[int, list[float]] = defaultdict(lambda: [-math.inf] * BELOW)
    placed = {}
    for index, span in sorted(enumerate(spans), key=lambda each: each[1].start):
        if span.kind not in COMMUNICATION:
            continue
        counts[span.rank, span.step, span.kind] += 1
        ends = free[span.rank]
        line = next((i for i, end in enumerate(ends) if end <= span.start), BELOW - 1)
        ends[line] = span.end
        placed[index] = counts[span.rank, span.step, span.kind], line
    return placed


def later_stages(drawn: Lanes) -> set[tuple[int, int | None]]:
    """(rank, stage) of the stages that are not the first of their rank."""
    stages = {(span.rank, span.stage) for span in drawn.spans if span.stage is not None}
    first = {rank: min(stage for each, stage in stages if each == rank) for rank, _ in stages}
    return {(rank, stage) for rank, stage in stages if stage != first[rank]}


def said(span: Span) -> str:
    """What the span is, with its duration."""
    what = span.kind.replace("_", "-")
    if span.chunk is not None:
        what += f" of micro-batch {span.chunk} in stage {span.stage}"
    elif span.label:
        what += f" ({span.label})"
    return f"{what}: {seconds(span.seconds)}"


def _faint(opacity: float) -> str:
    return f' fill-opacity="{opacity}"' if opacity < 1 else ""


def _kinds(drawn: Lanes) -> dict[str, str]:
    """The names of the kinds of spans, in a fixed order. A backward of two halves has a name for each."""
    kinds = {span.kind for span in drawn.spans}
    halves = {"backward": "backward: inputs", "weights": "backward: weights"} if "weights" in kinds else {}
    return {kind: halves.get(kind, kind.replace("_", "-")) for kind in Palette.SPANS if kind in kinds}


def _in_legend(drawn: Lanes) -> list[tuple[str, str]]:
    marks = [(swatch(f'fill="{Palette.SPANS[kind]}"'), name) for kind, name in _kinds(drawn).items()]
    if any(span.chunk is not None for span in drawn.spans):
        marks.append((swatch(f'fill="{IDLE}"'), "bubble"))
    return [*marks, ("", "paler: second stage")] if later_stages(drawn) else marks
