"""Draws how a batch, a model or a machine is divided among ranks, and how they sum what each of them has."""

from __future__ import annotations

import math
from collections.abc import Iterator

from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, boxes, colour_of, frames, sheet, words

__all__ = ["groups", "hosts", "mesh", "moments", "replicas", "ring", "shards", "split"]

UNITS_LEFT, UNITS_ROW, HELD_TALL = 78.0, 34, 66


def moments(units: int, *, reshard: bool = True) -> Iterator[tuple[str, int, set[int]]]:
    """(phase, unit that computes, units that are whole) in a step. With `reshard` they are freed after forward."""
    whole: set[int] = set()
    for unit in range(units):
        whole = {unit} if reshard else whole | {unit}
        yield "forward", unit, set(whole)
    for unit in reversed(range(units)):
        whole = {unit} if reshard else whole
        yield "backward", unit, set(whole)
        whole = whole - {unit}
    yield "optimizer", -1, set()


def shards(units: int, ranks: int, *, reshard: bool = True) -> Picture:
    """Draws FSDP: units that are gathered before they compute and freed afterwards. Above are the units on every rank,
    with the part of other ranks paler; below are the parameters that a rank holds over the step. The still picture
    shows the end of forward."""
    wide = (WIDTH - UNITS_LEFT - 10) / units
    steps = list(moments(units, reshard=reshard))
    bar = (WIDTH - UNITS_LEFT - 10) / len(steps)
    base = 34 + ranks * UNITS_ROW + HELD_TALL + 30
    shown, curve = [], ""
    for i, (phase, now, whole) in enumerate(steps):
        drawn = words(UNITS_LEFT, 16, _phase_of_a_unit(phase, now, reshard), bold=True)
        cell = wide - 4
        for rank in range(ranks):
            y, part, x = 26 + rank * UNITS_ROW, cell / ranks, [UNITS_LEFT + unit * wide for unit in range(units)]
            whole_units = [(x[unit], y, cell, UNITS_ROW - 8) for unit in sorted(whole)]
            drawn += boxes(whole_units, colour_of(rank), ' fill-opacity=".45"')
            drawn += boxes([(left + rank * part, y, part, UNITS_ROW - 8) for left in x], colour_of(rank))
            drawn += boxes([(left, y, cell, UNITS_ROW - 8) for left in x], "none", f' stroke="{GREY}"')
            if now >= 0:
                drawn += box(x[now], y, cell, UNITS_ROW - 8, line=colour_of(5), round=0)
        share = (len(whole) + (units - len(whole)) / ranks) / units
        curve += box(
            UNITS_LEFT + i * bar, base - HELD_TALL * share, bar - 1, HELD_TALL * share, GREY, opacity=0.7, round=0
        )
        here = box(UNITS_LEFT + i * bar, base + 3, bar - 1, 4, colour_of(5))
        shown.append(drawn + here)
    names = "".join(
        words(0, 26 + rank * UNITS_ROW + 17, f"rank {rank}", fill=colour_of(rank), bold=True) for rank in range(ranks)
    )
    axis = (
        f'<path d="M{UNITS_LEFT} {base - HELD_TALL}H{WIDTH - 10}" stroke="{GREY}" stroke-dasharray="4 3"/>'
        + words(UNITS_LEFT - 6, base - HELD_TALL + 4, "all of it", anchor="end", size=11)
        + words(UNITS_LEFT - 6, base - HELD_TALL / ranks + 4, f"1/{ranks}", anchor="end", size=11)
        + words(0, base - HELD_TALL - 10, "what a rank holds of the parameters", size=12)
        + words(UNITS_LEFT + units * bar / 2, base + 22, "forward", anchor="middle", size=12)
        + words(UNITS_LEFT + units * bar * 1.5, base + 22, "backward", anchor="middle", size=12)
        + words(WIDTH - 10, base + 22, "optimizer", anchor="end", size=12)
    )
    most = max(len(whole) for _, _, whole in steps)
    label = f"{units} units on {ranks} ranks: at most {most} of them whole at the same time"
    return sheet([names, curve, axis, frames(shown, 0.9, units - 1)], base + 30, label)


def _phase_of_a_unit(phase: str, unit: int, reshard: bool) -> str:
    if phase == "optimizer":
        return "optimizer: each rank updates its own shards"
    gather = "" if phase == "backward" and not reshard else "gather it, "
    after = ", scatter its gradients, free it" if phase == "backward" else ", free it" if reshard else ""
    return f"{phase}, unit {unit + 1}: {gather}compute{after}"


SAMPLE, BATCH_TOP = 15, 30


def replicas(ranks: int, batch: int = 8, *, share: float = 1.0) -> Picture:
    """Draws a global batch that is dealt out to `ranks` processes, each of which holds `share` of the model between two
    steps."""
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
        parts.append(box(x, BATCH_TOP, SAMPLE, SAMPLE, colour_of(rank), opacity=0.35))
        parts.append(f"<g>{move}{box(x, BATCH_TOP, SAMPLE, SAMPLE, colour_of(rank))}</g>")
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


SAYS = {
    "pipeline": "activations, from stage to stage",
    "data": "weights and gradients",
    "tensor": "sums, in every block",
}
MESH_ROW, MESH_TOP = 26, 40


def groups(pipeline: int, data: int, tensor: int) -> dict[str, list[list[int]]]:
    """The ranks of each group, by axis. A rank is (stage × data + replica) × tensor + part, as in a DeviceMesh."""
    rank = [[[(p * data + d) * tensor + t for t in range(tensor)] for d in range(data)] for p in range(pipeline)]
    return {
        "pipeline": [[rank[p][d][t] for p in range(pipeline)] for d in range(data) for t in range(tensor)],
        "data": [[rank[p][d][t] for d in range(data)] for p in range(pipeline) for t in range(tensor)],
        "tensor": [rank[p][d] for p in range(pipeline) for d in range(data)],
    }


def mesh(pipeline: int, data: int, tensor: int) -> Picture:
    """Draws the ranks of a mesh once for each axis; those of one colour are in one process group along it. A block of
    rows is a stage, a row a replica."""
    wide = WIDTH / 3
    cell = min(56.0, (wide - 24) / tensor)
    drawn, label = "", []
    for panel, (axis, members) in enumerate(groups(pipeline, data, tensor).items()):
        left, alone = panel * wide, len(members[0]) == 1
        drawn += words(left, 15, axis, bold=True) + words(left, 32, "nothing" if alone else SAYS[axis], size=11)
        for number, ranks in enumerate(members):
            for rank in ranks:
                stage, row, column = rank // (data * tensor), rank // tensor % data, rank % tensor
                x, y = left + column * cell, MESH_TOP + row * MESH_ROW + stage * (data * MESH_ROW + 10)
                colour = colour_of(7 if alone else number)
                drawn += box(x, y, cell - 3, MESH_ROW - 4, colour, opacity=0.35 if alone else 1)
                fill = "" if alone else "#fff"
                drawn += words(x + cell / 2 - 1.5, y + 16, str(rank), anchor="middle", size=12, fill=fill)
        label.append(f"{axis} groups {members}")
    height = MESH_TOP + pipeline * (data * MESH_ROW + 10)
    return sheet([drawn], height, f"{pipeline} x {data} x {tensor} ranks: {'; '.join(label)}")


def hosts(nnodes: int, nproc_per_node: int) -> Picture:
    """Draws hosts with a torchrun each, their ranks (node_rank * nproc_per_node + local_rank), and where they meet."""
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


RING_ACROSS, RING_DOWN, RING_MIDDLE, RING_CENTRE = 235, 112, 350, 160
CHUNK_WIDE, CHUNK_TALL = 30, 26


def ring(ranks: int) -> Picture:
    """Draws an all-reduce as a ring of N ranks, which takes 2 (N - 1) steps. A chunk has a stripe for each rank whose
    gradients are in it."""
    inside = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    where = [_on_the_ring(rank, ranks) for rank in range(ranks)]
    shown = []
    for step in range(2 * (ranks - 1)):
        summing = step < ranks - 1
        arrived, moving = [[set(chunk) for chunk in each] for each in inside], ""
        for rank in range(ranks):
            chunk, to = (rank - step) % ranks, (rank + 1) % ranks
            arrived[to][chunk] = inside[rank][chunk] | (inside[to][chunk] if summing else set())
            moving += _moving_chunk(inside[rank][chunk], chunk, where[rank], where[to], ranks)
        phase, number = (
            ("reduce_scatter: add what arrives", step + 1) if summing else ("all_gather: pass it on", step - ranks + 2)
        )
        caption = _in_the_middle(f"step {number} of {ranks - 1}", phase)
        shown.append(_all_chunks(inside, where, ranks) + moving + caption)
        inside = arrived
    shown.append(_all_chunks(inside, where, ranks) + _in_the_middle("done", "every rank has the whole sum"))
    names = [
        words(x, y - 22, f"rank {rank}", anchor="middle", fill=colour_of(rank), bold=True)
        for rank, (x, y) in enumerate(where)
    ]
    return sheet(
        [*names, frames(shown, 2.0)], 2 * RING_CENTRE,
        f"{ranks} ranks in a ring pass chunks along: {ranks - 1} steps add, {ranks - 1} steps pass the sums along",
    )  # fmt: skip


def _on_the_ring(rank: int, ranks: int) -> tuple[float, float]:
    angle = 2 * math.pi * rank / ranks - (math.pi / 2 if ranks != 2 else math.pi)
    return RING_MIDDLE + RING_ACROSS * math.cos(angle), RING_CENTRE + RING_DOWN * math.sin(angle)


def _in_the_middle(first: str, second: str) -> str:
    return words(RING_MIDDLE, RING_CENTRE - 6, first, anchor="middle", bold=True) + words(
        RING_MIDDLE, RING_CENTRE + 14, second, anchor="middle", size=12
    )


def _chunks(placed: list[tuple[set[int], float, float]], ranks: int) -> str:
    """Chunks at (x, y), with a stripe for each rank that is in them."""
    each = CHUNK_TALL / ranks
    stripes = (
        boxes(
            [(x, y + rank * each, CHUNK_WIDE - 3, each) for inside, x, y in placed if rank in inside], colour_of(rank)
        )
        for rank in range(ranks)
    )
    edges = boxes(
        [(x, y, CHUNK_WIDE - 3, CHUNK_TALL) for _, x, y in placed], "none", f' stroke="{GREY}" stroke-width="1.2"'
    )
    return "".join(stripes) + edges


def _all_chunks(inside: list[list[set[int]]], where: list[tuple[float, float]], ranks: int) -> str:
    return _chunks(
        [
            (chunk, x - ranks * CHUNK_WIDE / 2 + i * CHUNK_WIDE, y - 13)
            for (x, y), chunks in zip(where, inside, strict=True)
            for i, chunk in enumerate(chunks)
        ],
        ranks,
    )


def _moving_chunk(
    inside: set[int], chunk: int, begin: tuple[float, float], end: tuple[float, float], ranks: int
) -> str:
    x, y = begin[0] - ranks * CHUNK_WIDE / 2 + chunk * CHUNK_WIDE, begin[1] - 13
    far = f"{end[0] - begin[0]:.0f} {end[1] - begin[1]:.0f}"
    move = (
        f'<animateTransform attributeName="transform" type="translate" values="0 0;{far};{far}" keyTimes="0;.85;1" '
        'dur="2s" repeatCount="indefinite"/>'
    )
    return f"<g>{move}{_chunks([(inside, x, y)], ranks)}</g>"


SPLIT_TOP, SPLIT_ROW = 34, 92
X, A, H, B, Y = 84.0, 170.0, 300.0, 430.0, 520.0  # left edges
SHORT, LONG, SPLIT_TALL = 48, 96, 64


def split(ranks: int) -> Picture:
    """Draws gelu(x A) B on several ranks: A is split by columns, B by rows. A matrix of the whole layer is an outline;
    what a rank has of it is filled."""
    part, names = LONG / ranks, ""
    shown = ["", "", "", ""]
    for rank in range(ranks):
        y, colour = SPLIT_TOP + rank * SPLIT_ROW, colour_of(rank)
        names += words(0, y + 30, f"rank {rank}", bold=True, fill=colour) + box(
            X, y, SHORT, SPLIT_TALL, GREY, opacity=0.6
        )
        names += box(A, y, LONG, SPLIT_TALL - 16, line=GREY) + box(A + rank * part, y, part, SPLIT_TALL - 16, colour)
        names += box(B, y, SHORT, SPLIT_TALL, line=GREY) + box(
            B, y + rank * SPLIT_TALL / ranks, SHORT, SPLIT_TALL / ranks, colour
        )
        names += box(H, y, LONG, SPLIT_TALL, line=GREY, round=0) + box(Y, y, SHORT, SPLIT_TALL, line=GREY, round=0)
        columns = box(H + rank * part, y, part, SPLIT_TALL, colour, opacity=0.8)
        partial = box(Y, y, SHORT, SPLIT_TALL, colour, opacity=0.4)
        stripes = "".join(
            box(Y + 74, y + other * SPLIT_TALL / ranks, SHORT, SPLIT_TALL / ranks, colour_of(other), round=0)
            for other in range(ranks)
        )
        shown[0] += columns
        shown[1] += columns
        shown[2] += columns + partial
        shown[3] += columns + partial + stripes + words(Y + 54, y + 36, "→")
    captions = (
        "x A: each rank computes its columns, whole",
        "gelu: acts on each column alone, so no rank needs another",
        "times its rows of B: a partial sum of the result",
        "all_reduce: the partial sums are added; every rank has the result",
    )
    height = SPLIT_TOP + ranks * SPLIT_ROW
    shown = [each + words(X, height + 6, caption, bold=True) for each, caption in zip(shown, captions, strict=True)]
    heads = zip((X, A, H, B, Y), ("x", "A", "gelu(x A)", "B", "y"), strict=True)
    head = "".join(words(x, 20, text, size=12) for x, text in heads) + words(Y + 74, 20, "sum", size=12)
    label = f"{ranks} ranks: columns of A, the same rows of B, one sum of {ranks} partial sums"
    return sheet([head, names, frames(shown, 1.6)], height + 14, label)
