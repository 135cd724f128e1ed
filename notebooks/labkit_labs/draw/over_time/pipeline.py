"""Draws micro-batches that pass through the stages of a pipeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from labkit.record import Span, bubble, elapsed
from labkit.view import Palette
from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, boxes, sheet, words

__all__ = ["grid"]

LEFT, ROW = 56.0, 26


def grid(
    spans: Sequence[Span],
    title: str = "",
    *,
    seconds: float | None = None,
    share: bool = True,
) -> Picture:
    """A row for each rank; grey is bubble, numbers are micro-batches, where all of a kind have room. `seconds` is the
    length of the axis, by default that of the step; `share` writes the bubble's share above."""
    spans = [span for span in spans if span.chunk is not None]
    ranks = 1 + max(span.rank for span in spans)
    begin, length = min(span.start for span in spans), elapsed(spans)
    scale = (WIDTH - LEFT - 4) / (seconds or length)
    idle = bubble(spans)
    top = 24
    back, bars = "", ""
    for rank in range(ranks):
        y = top + rank * ROW
        back += words(0, y + 16, f"rank {rank}", size=12) + box(
            LEFT, y, length * scale, ROW - 4, GREY, opacity=0.3, round=0
        )
    of_colour: dict[tuple[str, float], list[tuple[float, float, float, float]]] = defaultdict(list)
    numbers = ""
    room = 1.5 + 6 * max(len(str(span.chunk)) for span in spans)
    numbered = {kind for kind in Palette.SPANS if all(s.seconds * scale > room for s in spans if s.kind == kind)}
    for span in spans:
        x, y, width = LEFT + (span.start - begin) * scale, top + span.rank * ROW, span.seconds * scale
        paler = 1.0 if (span.stage or 0) < ranks else 0.6  # a rank's second stage
        of_colour[Palette.SPANS[span.kind], paler].append((x, y, max(0.2, width - 0.6), ROW - 4))
        if span.kind in numbered:
            numbers += f'<text x="{x + width / 2:.1f}" y="{y + 16}">{span.chunk}</text>'
    for (colour, opacity), places in of_colour.items():
        bars += boxes(places, colour, f' fill-opacity="{opacity}"' if opacity < 1 else "")
    bars += f'<g fill="#fff" text-anchor="middle" font-size="10">{numbers}</g>'
    height = top + ranks * ROW + 6
    head = words(0, 15, ": ".join(filter(None, [title, f"bubble {idle:.1%}" if share else ""])), bold=True)
    label = f"{title or 'pipeline'} on {ranks} ranks, {length:.3g} s{f', bubble {idle:.1%}' if share else ''}"
    return sheet([head, _key(spans), back, bars], height, label)


def _key(spans: Sequence[Span]) -> str:
    x, drawn, kinds = WIDTH - 4.0, "", {span.kind for span in spans}
    halves = {"weights": "backward: weights", "backward": "backward: inputs"} if "weights" in kinds else {}
    for kind in ("weights", "backward", "forward"):
        if kind in kinds:
            name = halves.get(kind, kind)
            x -= 20 + 6.6 * len(name)
            drawn += box(x, 5, 10, 10, Palette.SPANS[kind]) + words(x + 14, 15, name, size=12)
    if not halves and len({(span.rank, span.stage) for span in spans}) > 1 + max(span.rank for span in spans):
        drawn += words(x - 8, 15, "paler: second stage", anchor="end", size=12)
    return drawn
