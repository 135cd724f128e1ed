"""Draws how a batch and machines are divided among ranks, and how ranks sum what each of them has."""

from __future__ import annotations

import math
from collections.abc import Iterator

from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, boxes, colour_of, sheet, words
from labkit_labs.draw.player import Film, Frame, film, moved

__all__ = ["chunks_of_ring", "hosts", "replicas", "ring"]

SAMPLE, BATCH_TOP = 15, 30


def replicas(ranks: int, batch: int = 8, *, share: float = 1.0) -> Film:
    """Draws a global batch that is dealt out to `ranks` processes, each of which holds `share` of the model between two
    steps."""
    base, room = [words(0, 20, f"one batch of {batch} samples", bold=True)], WIDTH / ranks
    left, dealt, gradients = WIDTH / 2 - batch * (SAMPLE + 3) / 2, "", ""
    for sample in range(batch):
        rank = sample % ranks
        x, goal = left + sample * (SAMPLE + 3), room * rank + room / 2 - 60 + (sample // ranks) * (SAMPLE + 3)
        base.append(box(x, BATCH_TOP, SAMPLE, SAMPLE, colour_of(rank), opacity=0.35))
        dealt += moved(box(goal, BATCH_TOP + 62, SAMPLE, SAMPLE, colour_of(rank)), x - goal, -62)
    for rank in range(ranks):
        x, colour = room * rank + 10, colour_of(rank)
        base += [
            box(x, 84, room - 20, 132, line=colour, round=8),
            words(x + 12, 132, f"rank {rank}", bold=True, fill=colour),
            words(x + room - 32, 132, "a process", anchor="end", size=12),
            box(x + 12, 142, room - 44, 32, line=GREY),
            box(x + 12 + (room - 44) * (rank * share % 1), 142, (room - 44) * share, 32, colour, opacity=0.35),
            words(x + room / 2 - 10, 163, "the model" if share == 1 else f"{share:.0%} of the model", anchor="middle"),
        ]
        gradients += box(x + 12, 182, room - 44, 26, colour, round=0)
        gradients += words(x + room / 2 - 10, 200, "gradients of its samples", anchor="middle", size=12, fill="#fff")
    base.append(box(10, 228, WIDTH - 20, 26, GREY, opacity=0.25, round=8))
    average = words(WIDTH / 2, 246, "the average of all gradients", anchor="middle", bold=True)
    held = "the whole model" if share == 1 else f"{share:.0%} of the model"
    after = "so all take the same step" if share == 1 else "and each rank gets those of its own part and updates it"
    frames = [
        Frame(f"Each of {ranks} ranks is a process that holds {held} between two steps.", []),
        Frame(f"The {batch} samples of a batch are dealt out, so that each rank has samples of its own.", [dealt]),
        Frame("Each rank computes the gradients of its samples, all at the same time.", [dealt, gradients]),
        Frame(f"The gradients are averaged over all ranks, {after}.", [dealt, gradients, average]),
    ]
    label = f"{batch} samples are dealt out to {ranks} ranks; each holds {held}; gradients are averaged"
    return film(base, frames, 262, label, seconds=3)


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


def chunks_of_ring(ranks: int) -> Iterator[list[list[set[int]]]]:
    """For each rank and each of its chunks, the ranks whose gradients are in it: before an all-reduce, and after every
    step of it. In step k rank r sends chunk r - 1 - k, so that after N - 1 steps chunk r is finished on rank r, where a
    reduce_scatter leaves it."""
    inside = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    yield inside
    for step in range(2 * (ranks - 1)):
        arrived = [[set(chunk) for chunk in each] for each in inside]
        for rank in range(ranks):
            chunk, to = (rank - 1 - step) % ranks, (rank + 1) % ranks
            arrived[to][chunk] = inside[rank][chunk] | (inside[to][chunk] if step < ranks - 1 else set())
        inside = arrived
        yield inside


def ring(ranks: int) -> Film:
    """Draws an all-reduce as a ring of N ranks, which takes 2 (N - 1) steps. A chunk has a stripe for each rank whose
    gradients are in it."""
    states = [*chunks_of_ring(ranks)]
    where = [_on_the_ring(rank, ranks) for rank in range(ranks)]
    begin = f"Each rank has cut its gradients into {ranks} chunks, and no chunk has been sent."
    frames = [Frame(begin, [_all_chunks(states[0], where, ranks), _in_the_middle("before", "own gradients only")])]
    for step, inside in enumerate(states[1:]):
        summing, moving = step < ranks - 1, ""
        for rank in range(ranks):
            chunk, to = (rank - 1 - step) % ranks, (rank + 1) % ranks
            (x, y), (from_x, from_y) = where[to], where[rank]
            placed = [(inside[to][chunk], x - ranks * CHUNK_WIDE / 2 + chunk * CHUNK_WIDE, y - 13)]
            moving += moved(_chunks(placed, ranks), from_x - x, from_y - y)
        turn = step + 1 if summing else step - ranks + 2
        what = (
            f"each rank sends a chunk to the next rank, which adds its own numbers: {turn + 1} ranks are in it"
            if summing
            else "each rank passes on a chunk that has all ranks in it, and the next rank keeps it as it is"
        )
        phase = "reduce-scatter" if summing else "all-gather"
        told = f"{phase.capitalize()}, step {turn} of {ranks - 1}: {what}."
        still = [
            [set() if number == (rank - 2 - step) % ranks else chunk for number, chunk in enumerate(chunks)]
            for rank, chunks in enumerate(inside)
        ]
        sent = f"sent by each rank so far: {step + 1} of these chunks"
        frames.append(Frame(told, [_all_chunks(still, where, ranks), moving, _in_the_middle(phase, sent)]))
    told = "Every rank has the whole sum: half of the steps added numbers up, the other half passed the sums on."
    frames.append(
        Frame(told, [_all_chunks(states[-1], where, ranks), _in_the_middle("done", "every rank has the sum")])
    )
    way = (
        f'<ellipse cx="{RING_MIDDLE}" cy="{RING_CENTRE}" rx="{RING_ACROSS}" ry="{RING_DOWN}" fill="none" '
        f'stroke="{GREY}" stroke-dasharray="2 6"/>'
    )
    names = [
        words(x, y - 22, f"rank {rank}", anchor="middle", fill=colour_of(rank), bold=True)
        for rank, (x, y) in enumerate(where)
    ]
    label = f"{ranks} ranks in a ring pass chunks along: {ranks - 1} steps add, {ranks - 1} steps pass the sums along"
    return film([way, *names], frames, 2 * RING_CENTRE, label, seconds=3.5)


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
