"""Draws hosts with a torchrun each, their ranks, and where they meet."""

from __future__ import annotations

from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, colour_of, sheet, words

__all__ = ["hosts"]


def hosts(nnodes: int, nproc_per_node: int) -> Picture:
    """rank = node_rank * nproc_per_node + local_rank."""
    room = WIDTH / nnodes
    wide = (room - 28) / nproc_per_node
    parts = []
    for node in range(nnodes):
        x = node * room + 4
        parts.append(box(x, 4, room - 8, 118, line=GREY, round=8))
        parts.append(words(x + 8, 20, f"node {node}", bold=True, size=12 if room > 60 else 9))
        parts.append(box(x + 8, 28, room - 24, 26, GREY, opacity=0.3, round=4))
        parts.append(words(x + room / 2 - 4, 45, "torchrun" if room > 90 else "", anchor="middle", size=12))
        for local in range(nproc_per_node):
            rank = node * nproc_per_node + local
            left = x + 8 + local * wide
            parts.append(box(left, 66, max(2.0, wide - 4), 46, colour_of(node), opacity=0.8, round=4))
            if wide > 22:
                middle = left + wide / 2 - 2
                parts.append(words(middle, 86, f"{rank}", anchor="middle", bold=True, fill="#fff"))
                if wide > 52:
                    parts.append(words(middle, 103, f"local {local}", anchor="middle", size=11, fill="#fff"))
    meeting = f"all meet at an address of node 0: rank 0 to {nnodes * nproc_per_node - 1}"
    parts.append(f'<path d="M{room / 2:.0f} 122V136H{(nnodes - 0.5) * room:.0f}V122" fill="none" stroke="{GREY}"/>')
    parts.append(words(WIDTH / 2, 154, meeting, anchor="middle", size=12))
    return sheet(parts, 160, f"{nnodes} nodes with {nproc_per_node} ranks each; {meeting}")
