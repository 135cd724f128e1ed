"""Draws two layers split over ranks: the first by columns, the second by rows."""

from __future__ import annotations

from labkit_labs.draw.picture import GREY, Picture, box, colour_of, frames, sheet, words

__all__ = ["split"]

TOP, ROW = 34, 92
X, A, H, B, Y = 84.0, 170.0, 300.0, 430.0, 520.0  # left edges
SHORT, LONG, TALL = 48, 96, 64


def split(ranks: int) -> Picture:
    """gelu(x A) B. A matrix of the whole layer is an outline; what a rank has of it is filled."""
    part, names = LONG / ranks, ""
    shown = ["", "", "", ""]
    for rank in range(ranks):
        y, colour = TOP + rank * ROW, colour_of(rank)
        names += words(0, y + 30, f"rank {rank}", bold=True, fill=colour) + box(X, y, SHORT, TALL, GREY, opacity=0.6)
        names += box(A, y, LONG, TALL - 16, line=GREY) + box(A + rank * part, y, part, TALL - 16, colour)
        names += box(B, y, SHORT, TALL, line=GREY) + box(B, y + rank * TALL / ranks, SHORT, TALL / ranks, colour)
        names += box(H, y, LONG, TALL, line=GREY, round=0) + box(Y, y, SHORT, TALL, line=GREY, round=0)
        columns = box(H + rank * part, y, part, TALL, colour, opacity=0.8)
        addend = box(Y, y, SHORT, TALL, colour, opacity=0.4)
        stripes = "".join(
            box(Y + 74, y + other * TALL / ranks, SHORT, TALL / ranks, colour_of(other), round=0)
            for other in range(ranks)
        )
        shown[0] += columns
        shown[1] += columns
        shown[2] += columns + addend
        shown[3] += columns + addend + stripes + words(Y + 54, y + 36, "→")
    captions = (
        "x A: each rank computes its columns, whole",
        "gelu: on each column alone, so no rank needs another",
        "times its rows of B: an addend of the result",
        "all_reduce: the addends are summed; every rank has the result",
    )
    height = TOP + ranks * ROW
    shown = [each + words(X, height + 6, caption, bold=True) for each, caption in zip(shown, captions, strict=True)]
    heads = zip((X, A, H, B, Y), ("x", "A", "gelu(x A)", "B", "y"), strict=True)
    head = "".join(words(x, 20, text, size=12) for x, text in heads) + words(Y + 74, 20, "sum", size=12)
    label = f"{ranks} ranks: columns of A, the same rows of B, one sum of {ranks} addends"
    return sheet([head, names, frames(shown, 1.6)], height + 14, label)
