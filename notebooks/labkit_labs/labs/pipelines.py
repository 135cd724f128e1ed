"""Calculates one step of a pipeline schedule: an action begins when its rank is free and what it needs exists."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise

from labkit.planner import actions
from labkit.spans import Span, bubble, elapsed

__all__ = ["bubble", "elapsed", "in_flight", "measured", "simulated"]

# actions of torch's schedules: I and W are the two halves of B
KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
LENGTHS = {"F": 1, "B": 2, "I": 1, "W": 1}  # in forwards
MAKES = {"F": "activations", "B": "gradients", "I": "gradients", "W": "weights"}
Made = tuple[str, int, int]  # by an action: what, stage, micro-batch


def simulated(schedule: str, micro_batches: int, seconds: Sequence[float], ranks: int = 0) -> list[Span]:
    """`seconds` is how long each stage needs for the forward of a micro-batch; its backward takes twice as long, and
    nothing else takes time. Rank r has the stages r, r + ranks, …; by default each rank has one."""
    ranks, last = ranks or len(seconds), len(seconds) - 1
    orders = [
        deque(actions(schedule, ranks, rank, range(rank, last + 1, ranks), micro_batches)) for rank in range(ranks)
    ]
    free = [0.0] * ranks
    ends: dict[Made, float] = {}
    spans = []
    while any(orders):
        for rank, order in enumerate(orders):
            while order and ends.keys() >= (needed := _needed(*order[0], last)):
                what, stage, number = order.popleft()
                begin = max([free[rank], *(ends[each] for each in needed)])
                for part in _parts(what, stage):
                    end = begin + seconds[stage] * LENGTHS[part]
                    spans.append(Span(rank, KINDS[part], begin, end, stage=stage, chunk=number))
                    begin = end
                free[rank] = ends[MAKES[what], stage, number] = begin
    return spans


def _needed(what: str, stage: int, number: int, last: int) -> set[Made]:
    """What must exist before an action begins. W follows its own I."""
    if what == "W" or (what == "F" and stage == 0):
        return set()
    if what == "F":
        return {("activations", stage - 1, number)}
    return {("gradients", stage + 1, number) if stage < last else ("activations", stage, number)}


def _parts(what: str, stage: int) -> str:
    """The actions that torch carries out for one. Nobody waits for the first stage's input gradients, so all of its
    backward is done as W."""
    if stage == 0 and what in ("I", "W"):
        return "WI" if what == "W" else ""
    return what


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
