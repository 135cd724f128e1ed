"""Draws an all-reduce as a ring: chunks that are passed on, and sums that grow."""

from __future__ import annotations

import math

from labkit_labs.draw.picture import GREY, Picture, boxes, colour_of, frames, sheet, words

__all__ = ["ring"]

ACROSS, DOWN, MIDDLE, CENTRE = 235, 112, 350, 160
CELL, TALL = 30, 26


def ring(ranks: int) -> Picture:
    """2 (N - 1) steps. A chunk of rank r has a stripe for each rank whose gradients are in it."""
    inside = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    where = [_place(rank, ranks) for rank in range(ranks)]
    shown = []
    for step in range(2 * (ranks - 1)):
        summing = step < ranks - 1
        arrived, moving = [[set(chunk) for chunk in each] for each in inside], ""
        for rank in range(ranks):
            chunk, to = (rank - step) % ranks, (rank + 1) % ranks
            arrived[to][chunk] = inside[rank][chunk] | (inside[to][chunk] if summing else set())
            moving += _moving(inside[rank][chunk], chunk, where[rank], where[to], ranks)
        phase, number = (
            ("reduce_scatter: add what arrives", step + 1) if summing else ("all_gather: pass it on", step - ranks + 2)
        )
        caption = _caption(f"step {number} of {ranks - 1}", phase)
        shown.append(_all(inside, where, ranks) + moving + caption)
        inside = arrived
    shown.append(_all(inside, where, ranks) + _caption("done", "every rank has the whole sum"))
    names = [
        words(x, y - 22, f"rank {rank}", anchor="middle", fill=colour_of(rank), bold=True)
        for rank, (x, y) in enumerate(where)
    ]
    return sheet(
        [*names, frames(shown, 2.0)], 2 * CENTRE,
        f"{ranks} ranks in a ring pass chunks along: {ranks - 1} steps add, {ranks - 1} steps pass the sums along",
    )  # fmt: skip


def _place(rank: int, ranks: int) -> tuple[float, float]:
    angle = 2 * math.pi * rank / ranks - (math.pi / 2 if ranks != 2 else math.pi)
    return MIDDLE + ACROSS * math.cos(angle), CENTRE + DOWN * math.sin(angle)


def _caption(first: str, second: str) -> str:
    return words(MIDDLE, CENTRE - 6, first, anchor="middle", bold=True) + words(
        MIDDLE, CENTRE + 14, second, anchor="middle", size=12
    )


def _chunks(placed: list[tuple[set[int], float, float]], ranks: int) -> str:
    """Chunks at (x, y), with a stripe for each rank that is in them."""
    each = TALL / ranks
    stripes = (
        boxes([(x, y + rank * each, CELL - 3, each) for inside, x, y in placed if rank in inside], colour_of(rank))
        for rank in range(ranks)
    )
    edges = boxes([(x, y, CELL - 3, TALL) for _, x, y in placed], "none", f' stroke="{GREY}" stroke-width="1.2"')
    return "".join(stripes) + edges


def _all(inside: list[list[set[int]]], where: list[tuple[float, float]], ranks: int) -> str:
    return _chunks(
        [
            (chunk, x - ranks * CELL / 2 + i * CELL, y - 13)
            for (x, y), chunks in zip(where, inside, strict=True)
            for i, chunk in enumerate(chunks)
        ],
        ranks,
    )


def _moving(inside: set[int], chunk: int, begin: tuple[float, float], end: tuple[float, float], ranks: int) -> str:
    x, y = begin[0] - ranks * CELL / 2 + chunk * CELL, begin[1] - 13
    far = f"{end[0] - begin[0]:.0f} {end[1] - begin[1]:.0f}"
    move = (
        f'<animateTransform attributeName="transform" type="translate" values="0 0;{far};{far}" keyTimes="0;.85;1" '
        'dur="2s" repeatCount="indefinite"/>'
    )
    return f"<g>{move}{_chunks([(inside, x, y)], ranks)}</g>"
