"""Divides a sequence over several ranks: how much attention each of them computes."""

from __future__ import annotations

import torch

from labkit_labs.draw.picture import GREY, Picture, box, colour_of, sheet, words

__all__ = ["divided", "in_order", "pairs", "zigzag"]

SIDE, GAP = 260.0, 60.0


def in_order(ranks: int) -> list[int]:
    """The rank of each of 2N chunks: rank 0 has the first two, rank 1 the next two, …"""
    return [chunk // 2 for chunk in range(2 * ranks)]


def zigzag(ranks: int) -> list[int]:
    """Rank r has chunk r and chunk 2N - 1 - r."""
    return [min(chunk, 2 * ranks - 1 - chunk) for chunk in range(2 * ranks)]


def pairs(owners: list[int], positions: int) -> list[int]:
    """By rank, the pairs of one of its queries and a key that this query sees, counted in the causal mask."""
    chunks = torch.ones(positions, positions, dtype=torch.bool).tril().chunk(len(owners))
    return [
        sum(int(rows.sum()) for owner, rows in zip(owners, chunks, strict=True) if owner == rank)
        for rank in range(max(owners) + 1)
    ]


def divided(ranks: int) -> Picture:
    """The causal mask, its rows in the color of the rank that computes them: in order, and zigzag."""
    parts, labels = [], []
    for place, (name, owners) in enumerate({"in order": in_order(ranks), "zigzag": zigzag(ranks)}.items()):
        left, tall = 50 + place * (SIDE + GAP), SIDE / len(owners)
        parts.append(words(left, 15, name, bold=True))
        parts.append(box(left, 26, SIDE, SIDE, line=GREY, round=0))
        for row, owner in enumerate(owners):
            top = 26 + row * tall
            edges = f"{left},{top} {left + row * tall},{top} {left + (row + 1) * tall},{top + tall} {left},{top + tall}"
            parts.append(f'<polygon points="{edges}" fill="{colour_of(owner)}" stroke="#fff" stroke-width="0.5"/>')
            if tall > 12:
                parts.append(words(left - 6, top + tall / 2 + 4, f"rank {owner}", anchor="end", size=11))
        work = pairs(owners, 64 * len(owners))
        mean = sum(work) / ranks
        shares = ", ".join(f"{each / mean:.2f}" for each in (work if ranks <= 4 else [work[0], work[-1]]))
        parts.append(words(left, SIDE + 44, f"work over the mean: {shares}", size=12))
        labels.append(f"{name}: {shares} of the mean")
    return sheet(parts, SIDE + 52, f"{ranks} ranks divide a causal mask; {'; '.join(labels)}")
