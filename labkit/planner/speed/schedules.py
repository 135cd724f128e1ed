"""Gives the order in which a pipeline rank computes: forwards (F) and backwards (B) of micro-batches through its
stages. A backward may be split into gradients of inputs (I) and, later, gradients of weights (W).

As in torch/distributed/pipelining/schedules.py of torch 2.13. Sources: GPipe (1811.06965), 1F1B and interleaved
(2104.04473), breadth-first (2211.05953), zero bubble and ZBV (2401.10241), DualPipeV (2412.19437).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

__all__ = ["Action", "actions"]

Action = tuple[str, int, int]  # kind, stage, micro-batch


def actions(schedule: str, ranks: int, rank: int, stages: Sequence[int], micro_batches: int) -> list[Action]:
    """The actions of `rank` in one step; `stages` are its stages in ascending order."""
    if schedule in ("GPipe", "LoopedBFS"):
        return _breadth_first(stages, micro_batches, reverse=schedule == "LoopedBFS")
    if schedule == "1F1B":
        return _one_forward_one_backward(stages[0], min(micro_batches, ranks - rank), micro_batches)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return _interleaved(ranks, rank, stages, micro_batches, zero_bubble=schedule == "InterleavedZeroBubble")
    there_and_back = {"ZBVZeroBubble": _zbv, "DualPipeV": _dual_pipe_v}[schedule]
    return there_and_back(ranks, rank, stages, micro_batches)


def _breadth_first(stages: Sequence[int], micro_batches: int, *, reverse: bool) -> list[Action]:
    numbers = range(micro_batches)
    there = [("F", stage, n) for stage in stages for n in numbers]
    back = [("B", stage, n) for stage in reversed(stages) for n in (reversed(numbers) if reverse else numbers)]
    return there + back


def _one_forward_one_backward(stage: int, warm_up: int, micro_batches: int) -> list[Action]:
    order = [("F", stage, n) for n in range(warm_up)]
    for n in range(micro_batches):
        order.append(("B", stage, n))
        if n + warm_up < micro_batches:
            order.append(("F", stage, n + warm_up))
    return order


class _Counted:
    """Actions whose micro-batches are numbered per stage and kind."""

    def __init__(self) -> None:
        self.order: list[Action] = []
        self.next: Counter[tuple[str, int]] = Counter()

    def add(self, kinds: str, stage: int) -> None:
        for kind in kinds:
            self.order.append((kind, stage, self.next[kind, stage]))
            self.next[kind, stage] += 1


def _interleaved(
    ranks: int, rank: int, stages: Sequence[int], micro_batches: int, *, zero_bubble: bool
) -> list[Action]:
    chunks, per_round = len(stages), micro_batches // max(1, micro_batches // ranks)
    every = chunks * micro_batches
    warm_up = min(every, (chunks - 1) * per_round + (1 if zero_bubble else 2) * (ranks - 1 - rank))

    def backward_stage(step: int) -> int:
        return stages[chunks - 1 - (step // per_round) % chunks]

    counted = _Counted()
    weights = 0
    for step in range(every + warm_up):
        if step < every:
            counted.add("F", stages[(step // per_round) % chunks])
        if step >= warm_up:
            counted.add("I" if zero_bubble else "B", backward_stage(step - warm_up))
            if zero_bubble and step - warm_up >= rank:
                counted.add("W", backward_stage(weights))
                weights += 1
    while zero_bubble and weights < every:
        counted.add("W", backward_stage(weights))
        weights += 1
    return counted.order


def _zbv(ranks: int, rank: int, stages: Sequence[int], micro_batches: int) -> list[Action]:
    first, second = stages
    counted = _Counted()
    most = max(2 * ranks - 1, micro_batches)
    for _ in range(2 * (ranks - rank) - 1):
        counted.add("F", first)
    for _ in range(rank):
        counted.add("F", second)
        counted.add("F", first)
    for _ in range(ranks - rank):
        counted.add("FIW", second)
    while counted.next["F", second] < counted.next["F", first] or counted.next["F", first] < most:
        if counted.next["F", first] < most:
            counted.add("F", first)
        counted.add("IW", first)
        counted.add("FIW", second)
    for _ in range(rank):
        counted.add("I", first)
        counted.add("I", second)
    for _ in range(ranks - rank):
        counted.add("IW", first)
    for stage in (second, first):
        while counted.next["W", stage] < counted.next["I", stage]:
            counted.add("W", stage)
    return [action for action in counted.order if action[2] < micro_batches]


def _dual_pipe_v(ranks: int, rank: int, stages: Sequence[int], micro_batches: int) -> list[Action]:
    first, second = stages
    order: list[Action] = []
    forwards: Counter[int] = Counter()
    backwards: Counter[int] = Counter()
    waiting: deque[tuple[int, int]] = deque()

    def forward(stage: int) -> None:
        order.append(("F", stage, forwards[stage]))
        forwards[stage] += 1

    def backward(stage: int, kind: str = "B") -> None:
        order.append((kind, stage, backwards[stage]))
        if kind == "I":
            waiting.append((stage, backwards[stage]))
        backwards[stage] += 1

    def weight() -> None:
        if waiting:
            order.append(("W", *waiting.popleft()))

    def repeat(times: int, *what: Callable[[], None]) -> None:
        for _ in range(times):
            for each in what:
                each()

    repeat(2 * (ranks - rank - 1), lambda: forward(first))
    repeat(rank + 1, lambda: forward(first), lambda: forward(second))
    repeat(ranks - rank - 1, lambda: backward(second, "I"), weight, lambda: forward(second))
    both = (lambda: forward(first), lambda: backward(second), lambda: forward(second), lambda: backward(first))
    repeat(micro_batches - 2 * ranks + rank + 1, *both)
    repeat(ranks - rank - 1, lambda: backward(second), lambda: forward(second), lambda: backward(first))
    half, split = (rank + 1) // 2, False
    for n in range(rank + 1):
        split = split or (n == half and rank % 2 == 1)
        backward(second, "I" if split else "B")
        split = split or (n == half and rank % 2 == 0)
        backward(first, "I" if split else "B")
    repeat(ranks - rank - 1, weight, lambda: backward(first, "I" if split else "B"))
    repeat(rank + 1, weight)
    return order
