"""Draws the collectives that ranks call, one after another: where they differ, all of them wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, colour_of, frames, sheet, words

__all__ = ["calls"]

LEFT, ROW, APART = 66.0, 38, "#d1495b"


def calls(made: Mapping[int | str, Sequence[str]], first: int | None = 1) -> Picture:
    """`made` has the names of the calls of each rank, or of another name, in order, numbered from `first`, if any; ""
    is no call. Calls with the same number must have the same name; where they do not, all wait."""
    count = max(map(len, made.values()))
    wide = (WIDTH - LEFT) / (count + 1)
    columns = [
        {rank: names[i] for rank, names in made.items() if names[i : i + 1] not in ([], [""])} for i in range(count)
    ]
    apart = next((i for i, column in enumerate(columns) if len(set(column.values())) > 1), None)
    parts = [words(0, 44 + row * ROW, _named(rank), size=12) for row, rank in enumerate(made)]
    shown, done = [], ""
    for i, column in enumerate(columns[: None if apart is None else apart + 1]):
        x = LEFT + i * wide
        done += words(x + wide / 2, 15, f"#{first + i}", anchor="middle", size=12) if first is not None else ""
        for row, rank in enumerate(made):
            if rank not in column:
                continue
            y = 24 + row * ROW
            colour = APART if i == apart else colour_of(0)
            done += box(x, y, wide - 4, ROW - 8, colour, round=4)
            done += words(x + wide / 2 - 2, y + 20, column[rank], anchor="middle", size=11, fill="#fff")
            if i == apart:
                done += box(x + wide, y, WIDTH - x - wide, ROW - 8, GREY, opacity=0.3, round=4)
                done += words(x + wide + 8, y + 20, "waits", size=12)
        shown.append(done)
    return sheet([*parts, frames(shown, 0.7)], 30 + len(made) * ROW, _label(made, first, apart))


def _named(rank: int | str) -> str:
    return rank if isinstance(rank, str) else f"rank {rank}"


def _label(made: Mapping[int | str, Sequence[str]], first: int | None, apart: int | None) -> str:
    if apart is None:
        return "; ".join(f"{_named(rank)}: {', '.join(filter(None, names))}" for rank, names in made.items())
    last = ", ".join(f"{_named(rank)} {names[apart]}" for rank, names in made.items())
    return f"call {(first or 0) + apart} differs: {last}; all of them wait"
