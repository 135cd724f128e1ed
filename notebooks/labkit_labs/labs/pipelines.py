"""Calculates one step of a pipeline schedule: an action begins when its rank is free and what it needs is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from labkit.planner import actions
from labkit.record import Span, bubble

__all__ = ["bubble", "in_flight", "measured", "simulated"]

KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}


def simulated(
    schedule: str, ranks: int, micro_batches: int, forward: float, backward: float, stages: int = 1
) -> list[Span]:
    """`forward` and `backward` are seconds of a rank for one micro-batch, over its `stages` stages. Nothing else takes
    time."""
    last = stages * ranks - 1
    orders = [actions(schedule, ranks, rank, range(rank, last + 1, ranks), micro_batches) for rank in range(ranks)]
    place, free = [0] * ranks, [0.0] * ranks
    ends: dict[tuple[str, int, int], float] = {}
    spans = []
    while any(place[rank] < len(orders[rank]) for rank in range(ranks)):
        for rank in range(ranks):
            while place[rank] < len(orders[rank]):
                what, stage, number = orders[rank][place[rank]]
                needs = ("back", stage + 1, number) if stage < last else ("F", stage, number)
                if what == "F":
                    needs = ("F", stage - 1, number)
                first = what == "W" or (what == "F" and stage == 0)  # W follows its own I
                if not first and needs not in ends:
                    break
                begin = free[rank] if first else max(free[rank], ends[needs])
                # nobody waits for the first stage's input gradients: torch does its whole backward as W
                parts = {"I": "", "W": "WI"}.get(what, what) if stage == 0 else what
                for part in parts:
                    end = begin + {"F": forward, "B": backward}.get(part, backward / 2) / stages
                    spans.append(Span(rank, KINDS[part], begin, end, stage=stage, chunk=number))
                    begin = end
                free[rank] = ends[{"F": "F", "W": "W"}.get(what, "back"), stage, number] = begin
                place[rank] += 1
    return spans


def measured(done: Sequence[Sequence[tuple[str, int, float, float]]]) -> list[Span]:
    """The same from what each rank wrote into DONE: (kind, stage, begin, end), with one clock. Forwards and backwards
    of a stage take the micro-batches in order. Unless the schedule splits backwards (weights are not always computed
    just before the inputs' gradients), the halves are one backward, as in `simulated`."""
    split = any(
        one[0] == "weights" and not (two[0] == "backward" and two[1] == one[1])
        for rank in done
        for one, two in pairwise([*rank, ("end", 0, 0.0, 0.0)])
    )
    spans = []
    for rank, actions_done in enumerate(done):
        numbers: Counter[tuple[str, int]] = Counter()
        began = None  # of a backward whose first half is over
        for kind, stage, begin, end in actions_done:
            if kind == "weights" and not split:
                began = begin
                continue
            start = began if kind == "backward" and began is not None else begin
            spans.append(Span(rank, kind, start, end, stage=stage, chunk=numbers[kind, stage]))
            numbers[kind, stage] += 1
            began = None
    return spans


def in_flight(spans: Sequence[Span], rank: int) -> float:
    """The most micro-batches whose activations a rank holds at once; one of several stages counts as a fraction."""
    held: set[tuple[int | None, int | None]] = set()
    most = 0
    mine = sorted((span for span in spans if span.rank == rank), key=lambda span: span.start)
    for span in mine:
        if span.kind == "forward":
            held.add((span.stage, span.chunk))
        else:
            held.discard((span.stage, span.chunk))
        most = max(most, len(held))
    return most / len({span.stage for span in mine})
