"""Finds the first collective in which ranks part, of those that they have called from Python, as their rings keep them.

The numbers of calls count those of C++, too: of DDP's backward passes, and what a compiler has made of others.
So a rank without a call of some number made another one; which one is only known if it was in a pass of DDP's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from labkit.ring import CALLS, IN_BACKWARD, NOT_SYNCHRONIZED, OF_DDP, UNKNOWN, Now, PythonCall
from labkit.witness.evidence import Evidence, Testimony

NONE = -1  # the number of a group that a rank has not used


@dataclass(frozen=True)
class Mismatch:
    """The first collective in which the ranks of a group part: `call` of `callers`, while `others` called `instead`, or
    are past it: in a backward pass or at a later call, as `where` says, in `line` (0: unknown). `is_due` if it was the
    others' turn, too: most of the ranks called it, or all had called it in this line as often, as many steps apart.

    If `of_pass`, the others have ended, without its collectives, a backward pass of DDP's in which the callers wait."""

    callers: tuple[int, ...]
    call: PythonCall
    others: tuple[int, ...]
    instead: PythonCall | None = None
    where: str = ""
    line: int = 0
    is_due: bool = False
    of_pass: bool = False


class _GroupCalls:
    """The newest calls of one rank in one group, by their number; all are known since number `oldest`, 0 if none is.
    `counted` is how many calls of the group, those of C++ included, the rank had made by its newest backward pass."""

    def __init__(self, calls: list[PythonCall], now: Now, counted: int, *, is_complete: bool):
        self.by_number = {call.number: call for call in calls}
        self.oldest = 1 if is_complete else min(self.by_number, default=0)
        self.now, self.counted = now, counted
        averages = now.flags & OF_DDP and not now.flags & NOT_SYNCHRONIZED
        self.in_pass = bool(counted != NONE and now.flags & IN_BACKWARD and averages)

    def later_than(self, call: PythonCall) -> PythonCall | None:
        """Its first call of a later number."""
        return next((each for number, each in sorted(self.by_number.items()) if number > call.number), None)

    def went_by(self, call: PythonCall) -> bool:
        """Whether the rank is past the place of this call without it: in a backward pass of DDP's, or after one."""
        if call.number in self.by_number or not 0 < self.oldest <= call.number or call.in_backward:
            return False
        if self.in_pass and self.counted + 1 >= call.number:
            return True
        later = self.later_than(call)
        return later is not None and moment(later) > moment(call) and self.counted != NONE


def first_mismatch(evidence: Evidence) -> Mismatch | None:
    """Where the ranks of a group part; None if they do not, or if it cannot be told."""
    for group in _groups(evidence):
        for number in sorted({number for calls in group.values() for number in calls.by_number}):
            made = {rank: calls.by_number[number] for rank, calls in group.items() if number in calls.by_number}
            if parties := two_parties({rank: _kind(call, group) for rank, call in made.items()}):
                return _unlike(*parties, made, group)
            call = next(iter(made.values()))
            past = tuple(rank for rank, calls in group.items() if calls.went_by(call))
            if past:
                return _past([*made], call, past, group)
    return None


def two_parties(kinds: Mapping[int, Hashable]) -> tuple[list[int], list[int]] | None:
    """The ranks whose calls are of the most frequent kind, and those of the next one; None if all are of one kind."""
    ranks: dict[Hashable, list[int]] = {}
    for rank, kind in kinds.items():
        ranks.setdefault(kind, []).append(rank)
    most, *others = sorted(ranks.values(), key=lambda each: -len(each)) or [[]]
    return (most, others[0]) if others else None


def _kind(call: PythonCall, group: Mapping[int, _GroupCalls]) -> tuple[str, int, str]:
    """What must be equal on all ranks. Sizes that a completed call had were allowed, and some are not known."""
    is_over = all(calls.later_than(call) or calls.counted > call.number for calls in group.values())
    own = [calls.by_number[call.number] for calls in group.values() if call.number in calls.by_number]
    if is_over or any(each.elements == UNKNOWN for each in own):
        return call.operation, UNKNOWN, ""
    return call.operation, call.elements, call.dtype


def _unlike(
    callers: list[int], others: list[int], made: Mapping[int, PythonCall], group: Mapping[int, _GroupCalls]
) -> Mismatch:
    """Calls of one number that differ. If one is of a later step, its rank left out the other."""
    call, instead = made[callers[0]], made[others[0]]
    if moment(call) == moment(instead):
        return Mismatch(tuple(callers), call, tuple(others), instead, line=instead.line)
    if moment(call) > moment(instead):
        callers, others, call, instead = others, callers, instead, call
    is_due = _is_due(callers[0], call, others, group)
    return Mismatch(tuple(callers), call, tuple(others), None, _later(instead), instead.line, is_due)


def _past(
    callers: list[int], call: PythonCall, others: tuple[int, ...], group: Mapping[int, _GroupCalls]
) -> Mismatch | None:
    ahead = [rank for rank in others if (group[rank].now.number, group[rank].now.passes) < moment(call)[:2]]
    if ahead:  # a pass that the callers have ended
        return Mismatch(tuple(ahead), call, tuple(callers), line=group[ahead[0]].now.line, of_pass=True)
    calls = group[others[0]]
    later = calls.later_than(call)
    where, line = (_later(later), later.line) if later else ("a backward pass", calls.now.line)
    is_due = len(callers) > len(others) or _is_due(callers[0], call, others, group)
    return Mismatch(tuple(callers), call, others, None, where, line, is_due)


def _later(call: PythonCall) -> str:
    return f"a later `{call.operation}`"


def moment(call: PythonCall) -> tuple[int, int, bool]:
    """In which step, after how many of its backward passes, and whether in the next one."""
    return call.step, call.passes, call.in_backward


def _is_due(rank: int, call: PythonCall, others: tuple[int, ...] | list[int], group: Mapping[int, _GroupCalls]) -> bool:
    """Whether all had made this call before, no more often in a step than now, and always as many steps apart."""
    own = group[rank]
    before = [each for each in own.by_number.values() if each.number < call.number and _is_alike(each, call)]
    if not all(_is_alike(each, group[r].by_number.get(each.number, call)) for r in others for each in before):
        return False
    times = Counter(each.step for each in before)
    now, steps = times.pop(call.step, 0) + 1, sorted(times)
    if own.oldest == 1:
        since = steps if 0 in steps else [0, *steps]
    else:
        since = steps = steps[1:]  # the ring may have forgotten some of its calls in the first of them
    gaps = {later - earlier for earlier, later in pairwise([*since, call.step])}
    return len(since) > 1 and len(gaps) == 1 and now <= min(times[step] for step in steps)


def _is_alike(one: PythonCall, other: PythonCall) -> bool:
    return (one.operation, one.line) == (other.operation, other.line)


def _groups(evidence: Evidence) -> Iterator[dict[int, _GroupCalls]]:
    """The calls of each group. A group of the same name and ranks that was made later is another one."""
    numbers: dict[tuple[Any, ...], dict[int, int]] = {}  # of a group, as each rank has numbered it
    default, again = set(), set()
    for rank, testimony in evidence.ranks.items():
        seen: Counter[tuple[Any, ...]] = Counter()
        for values in (line.values for line in testimony.of("group")):
            named = values["name"], *values["ranks"]
            seen[named] += 1
            group = seen[named], *named
            numbers.setdefault(group, dict.fromkeys(values["ranks"], NONE))[rank] = values["n"]
            if values["default"]:
                default.add(group)
            if seen[named] > 1:
                again.add(named)
    for group, known in numbers.items():
        ranks = ((rank, number, evidence.ranks[rank]) for rank, number in known.items() if rank in evidence.ranks)
        is_counted = group[1:] not in again  # else rings may count the calls of another one
        calls = {
            rank: _calls_of(each, group[1], number, is_default=group in default, is_counted=is_counted)
            for rank, number, each in ranks
        }
        yield {rank: own for rank, own in calls.items() if own is not None}


def _calls_of(
    testimony: Testimony, name: str, number: int, *, is_default: bool, is_counted: bool
) -> _GroupCalls | None:
    """A rank's calls in the group to which it has given this number."""
    now, calls = testimony.ring.now(), testimony.ring.calls()
    if now is None:
        return None
    models = testimony.of("ddp", n=0)  # the ring counts the calls of this model's group, or else of the default one
    is_counted = is_counted and (models[0].values["group"] == name if models else is_default)
    own = [call for call in calls if call.group == number]
    return _GroupCalls(own, now, now.calls if is_counted else NONE, is_complete=len(calls) < CALLS)
