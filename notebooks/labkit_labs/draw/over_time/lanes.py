"""Draws what ranks do over time: computation, below it communication, and waiting."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from labkit import words as texts
from labkit.record import COMMUNICATION, Span
from labkit.view import Palette
from labkit_labs.draw.picture import WIDTH, Picture, box, boxes, sheet, sweep, words

__all__ = ["lanes"]

LEFT, TOP, ROW, THICK, THIN = 56.0, 24, 42, 18, 9


def lanes(
    spans: Sequence[Span], title: str = "", *, moving: bool = False, names: Mapping[int, str] | None = None
) -> Picture:
    """Two lanes for each rank, in the colors of a run's timeline. With `moving` the picture plays in a loop. `names`
    replaces the names of the spans' ranks."""
    called = names or {rank: f"rank {rank}" for rank in sorted({span.rank for span in spans})}
    end = max(span.end for span in spans)
    scale = (WIDTH - LEFT - 4) / end
    rows = {rank: TOP + i * ROW for i, rank in enumerate(called)}
    places: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    for span in spans:
        sends = span.kind in COMMUNICATION
        y, tall = rows[span.rank] + (THICK + 3 if sends else 0), THIN if sends else THICK
        places[span.kind].append((LEFT + span.start * scale, y, max(0.3, span.seconds * scale - 1), tall))
    bars = "".join(boxes(each, Palette.SPANS[kind]) for kind, each in places.items())
    height = TOP + len(called) * ROW
    bars = sweep(bars, LEFT, height, moving)
    labels = "".join(words(0, y + 14, called[rank], size=12) for rank, y in rows.items())
    whose = ", ".join(called.values()) if names else f"{len(called)} ranks"
    label = f"{title or 'a step'} of {whose}: {', '.join(places)}; {texts.seconds(end)}"
    return sheet([words(0, 15, title, bold=True) if title else "", _key([*places]), labels, bars], height, label)


def _key(kinds: Sequence[str]) -> str:
    x, drawn = WIDTH - 4.0, ""
    for kind in reversed(kinds):
        x -= 22 + 7 * len(kind)
        drawn += box(x, 5, 10, 10, Palette.SPANS[kind]) + words(x + 14, 15, kind, size=12)
    return drawn
