"""Draws ranks: what each of them has, and what they do with a batch."""

from __future__ import annotations

from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, colour_of, sheet, words

__all__ = ["replicas"]

SAMPLE, TOP = 15, 30


def replicas(ranks: int, batch: int = 8, *, share: float = 1.0) -> Picture:
    """A global batch dealt out to `ranks` processes, each of which holds `share` of the model between two steps."""
    parts = [words(0, 20, f"one batch of {batch} samples", bold=True)]
    left = WIDTH / 2 - batch * (SAMPLE + 3) / 2
    room = WIDTH / ranks
    for sample in range(batch):
        rank = sample % ranks
        x, goal = left + sample * (SAMPLE + 3), room * rank + room / 2 - 60 + (sample // ranks) * (SAMPLE + 3)
        path = f"0 0;0 0;{goal - x:.0f} 62;{goal - x:.0f} 62"
        move = (
            f'<animateTransform attributeName="transform" type="translate" values="{path}" keyTimes="0;.15;.5;1" '
            'dur="5s" repeatCount="indefinite"/>'
        )
        parts.append(box(x, TOP, SAMPLE, SAMPLE, colour_of(rank), opacity=0.35))
        parts.append(f"<g>{move}{box(x, TOP, SAMPLE, SAMPLE, colour_of(rank))}</g>")
    for rank in range(ranks):
        x, colour = room * rank + 10, colour_of(rank)
        parts += [
            box(x, 84, room - 20, 132, line=colour, round=8),
            words(x + 12, 132, f"rank {rank}", bold=True, fill=colour),
            words(x + room - 32, 132, "a process", anchor="end", size=12),
            box(x + 12, 142, room - 44, 32, line=GREY),
            box(x + 12 + (room - 44) * (rank * share % 1), 142, (room - 44) * share, 32, colour, opacity=0.35),
            words(x + room / 2 - 10, 163, "the model" if share == 1 else f"{share:.0%} of the model", anchor="middle"),
            words(x + room / 2 - 10, 200, "gradients of its own samples", anchor="middle", size=12),
        ]
    parts += [
        box(10, 228, WIDTH - 20, 26, GREY, opacity=0.25, round=8),
        words(
            WIDTH / 2,
            246,
            "average the gradients: every rank gets the same ones and takes the same step"
            if share == 1
            else "average the gradients: each rank gets those of its own part, and updates that part",
            anchor="middle",
        ),
    ]
    held = "the whole model" if share == 1 else f"{share:.0%} of the model"
    return sheet(
        parts, 262, f"{batch} samples are dealt out to {ranks} ranks; each holds {held}; gradients are averaged"
    )
