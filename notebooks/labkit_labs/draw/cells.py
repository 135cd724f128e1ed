"""Draws a script as its titled cells."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, colour_of, sheet, words

__all__ = ["cells"]

ACROSS, TALL = 5, 34


def cells(titles: Collection[str], marked: Mapping[str, Collection[str]]) -> Picture:
    """A box for each cell of a script, in order, by rows. `marked`: the titles of a kind, which get its color."""
    kinds = {title: number for number, of_kind in enumerate(marked.values()) for title in of_kind}
    wide = WIDTH / ACROSS
    parts, left = [], 0.0
    for number, kind in enumerate(marked):
        parts.append(box(left, 5, 11, 11, colour_of(number)) + words(left + 16, 15, kind, size=12))
        left += 40 + 7 * len(kind)
    for place, title in enumerate(titles):
        x, y = place % ACROSS * wide, 28 + place // ACROSS * (TALL + 8)
        colour = colour_of(kinds[title]) if title in kinds else ""
        parts.append(box(x, y, wide - 10, TALL, colour or "none", line="" if colour else GREY, round=6))
        parts.append(words(x + wide / 2 - 5, y + 22, title, anchor="middle", fill="#fff" if colour else ""))
    rows = -(-len(titles) // ACROSS)
    label = "; ".join(f"{kind}: {', '.join(sorted(of_kind))}" for kind, of_kind in marked.items())
    return sheet(parts, 28 + rows * (TALL + 8), f"a script of {len(titles)} cells; {label}")
