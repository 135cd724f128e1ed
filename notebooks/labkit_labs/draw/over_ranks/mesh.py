"""Draws a mesh of ranks, and the process groups along each of its axes."""

from __future__ import annotations

from labkit_labs.draw.picture import WIDTH, Picture, box, colour_of, sheet, words

__all__ = ["groups", "mesh"]

SAYS = {
    "pipeline": "activations, from stage to stage",
    "data": "weights and gradients",
    "tensor": "sums, in every block",
}
ROW, TOP = 26, 40


def groups(pipeline: int, data: int, tensor: int) -> dict[str, list[list[int]]]:
    """The ranks of each group, by axis. A rank is (stage × data + replica) × tensor + part, as in a DeviceMesh."""
    rank = [[[(p * data + d) * tensor + t for t in range(tensor)] for d in range(data)] for p in range(pipeline)]
    return {
        "pipeline": [[rank[p][d][t] for p in range(pipeline)] for d in range(data) for t in range(tensor)],
        "data": [[rank[p][d][t] for d in range(data)] for p in range(pipeline) for t in range(tensor)],
        "tensor": [rank[p][d] for p in range(pipeline) for d in range(data)],
    }


def mesh(pipeline: int, data: int, tensor: int) -> Picture:
    """The same ranks three times; those of one colour are in one group. A block of rows is a stage, a row a replica."""
    wide = WIDTH / 3
    cell = min(56.0, (wide - 24) / tensor)
    drawn, label = "", []
    for panel, (axis, members) in enumerate(groups(pipeline, data, tensor).items()):
        left, alone = panel * wide, len(members[0]) == 1
        drawn += words(left, 15, axis, bold=True) + words(left, 32, "nothing" if alone else SAYS[axis], size=11)
        for number, ranks in enumerate(members):
            for rank in ranks:
                stage, row, column = rank // (data * tensor), rank // tensor % data, rank % tensor
                x, y = left + column * cell, TOP + row * ROW + stage * (data * ROW + 10)
                colour = colour_of(7 if alone else number)
                drawn += box(x, y, cell - 3, ROW - 4, colour, opacity=0.35 if alone else 1)
                fill = "" if alone else "#fff"
                drawn += words(x + cell / 2 - 1.5, y + 16, str(rank), anchor="middle", size=12, fill=fill)
        label.append(f"{axis} groups {members}")
    height = TOP + pipeline * (data * ROW + 10)
    return sheet([drawn], height, f"{pipeline} x {data} x {tensor} ranks: {'; '.join(label)}")
