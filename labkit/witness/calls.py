"""Compares the collectives that ranks have called from Python, call by call, as their rings keep them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from labkit.ring import CALLS, IN_BACKWARD, NOT_SYNCHRONIZED, Called, Now
from labkit.witness.evidence import Evidence, Testimony

DEFAULT = "default_pg"
NONE = -1  # the number of a group that a rank has not used


@dataclass(frozen=True)
class Parting:
    """A collective that a `rank` called and `other` did not, which called `instead`, or else has gone on: to what
    `where` says, in `line` (0: unknown). `is_due` if it was the other's turn, too: both had called it in this line
    before, and at these intervals. If `of_pass`, `rank` is in a backward pass in `line` that `other` has ended, which
    then called `call`: it left out collectives of the pass."""

    rank: int
    call: Called
    other: int
    instead: Called | None = None
    where: str = ""
    line: int = 0
    is_due: bool = False
    of_pass: bool = False


class _Calls:
    """The newest calls of one rank in one group, by their number. `oldest` is the first number since which all are
    known; `passed` is the last number that the group's calls, C++'s among them, are known to have reached."""

    def __init__(self, calls: list[Called], now: Now, *, counts: bool, is_complete: bool):
        numbers = [call.number for call in calls]
        start = max((place for place, (a, b) in enumerate(pairwise(numbers), 1) if b <= a), default=0)
        self.by_number = {call.number: call for call in calls[start:]}  # those of a new group with an old one's name
        self.oldest = 1 if is_complete and not start else min(self.by_number, default=0)
        self.now = now
        self.in_backward = counts and bool(now.flags & IN_BACKWARD) and not now.flags & NOT_SYNCHRONIZED
        self.passed = max([*self.by_number, now.calls if counts else 0])

    def went_by(self, call: Called) -> bool:
        """Whether the rank is past the place of this call, and called it not. In a backward pass it is past those that
        others called before theirs."""
        passed = self.passed + (self.in_backward and not call.in_backward)
        return 0 < self.oldest <= call.number <= passed and call.number not in self.by_number


def parting(evidence: Evidence) -> Parting | None:
    """The first collective that some ranks of a group called and others did not; None if there is none."""
    for group in _groups(evidence):
        for number in sorted({number for calls in group.values() for number in calls.by_number}):
            made = {rank: calls.by_number[number] for rank, calls in group.items() if number in calls.by_number}
            rank, call = next(iter(made.items()))
            unlike = [other for other, its in made.items() if _differ(call, its, group[rank], group[other])]
            if unlike and (moment(call) == moment(made[unlike[0]])):
                return Parting(rank, call, unlike[0], made[unlike[0]], "", made[unlike[0]].line)
            if unlike:
                earlier, later = sorted([rank, unlike[0]], key=lambda each: moment(made[each]))
                return _without(earlier, made[earlier], later, group)
            others = [other for other, calls in group.items() if calls.went_by(call)]
            in_pass = [other for other in others if _is_in_pass(group[other].now, call)]
            if in_pass:
                return Parting(in_pass[0], call, rank, line=group[in_pass[0]].now.line, of_pass=True)
            if others:
                return _without(rank, call, others[0], group)
    return None


def _differ(one: Called, other: Called, *calls: _Calls) -> bool:
    """Whether the calls cannot be the same collective. What has been completed in spite of its sizes allowed them."""
    if one.operation != other.operation:
        return True
    is_over = all(max(each.by_number) > one.number for each in calls)
    return not is_over and (one.elements, one.dtype) != (other.elements, other.dtype)


def moment(call: Called) -> tuple[int, int]:
    """In which step, and after how many of its backward passes."""
    return call.step, call.passes


def _is_in_pass(now: Now, call: Called) -> bool:
    return bool(now.flags & IN_BACKWARD) and (now.number, now.passes) < moment(call)


def _without(rank: int, call: Called, other: int, group: Mapping[int, _Calls]) -> Parting:
    calls, own = group[other], group[rank].by_number
    later = next((each for number, each in sorted(calls.by_number.items()) if number >= call.number), None)
    where, line = ("a backward pass", calls.now.line) if calls.in_backward and later is None else ("a later call", 0)
    if later is not None:
        where, line = "a later step" if moment(later) > moment(call) else where, later.line
    before = [each for each in own.values() if each.number < call.number and _is_alike(each, call)]
    answered = all(_is_alike(each, calls.by_number.get(each.number, call)) for each in before)
    steps = [*([0] if group[rank].oldest == 1 else []), *(each.step for each in before), call.step]
    gaps = [b - a for a, b in pairwise(steps)]
    pairs = [*pairwise(gaps)]
    is_usual = gaps[-1:] and gaps[-1] in gaps[:-1] and (len(pairs) < 2 or pairs[-1] in pairs[:-1])
    return Parting(rank, call, other, None, where, line, bool(before and answered and is_usual))


def _is_alike(one: Called, other: Called) -> bool:
    return (one.operation, one.line) == (other.operation, other.line)


def _groups(evidence: Evidence) -> Iterator[dict[int, _Calls]]:
    """The calls of each group that several ranks know, the default group's first."""
    numbers: dict[tuple[Any, ...], dict[int, int]] = {}  # of a group, by its name and ranks
    default = set()
    for rank, testimony in evidence.ranks.items():
        for values in (line.values for line in testimony.of("group")):
            group = values["name"], *values["ranks"]
            numbers.setdefault(group, dict.fromkeys(values["ranks"], NONE))[rank] = values["n"]
            default |= {group} if values["called"] == DEFAULT else set()
    for group, known in numbers.items():
        ranks = ((rank, number, evidence.ranks[rank]) for rank, number in known.items() if rank in evidence.ranks)
        calls = {rank: _calls_of(each, group[0], number, group in default) for rank, number, each in ranks}
        yield {rank: own for rank, own in calls.items() if own is not None}


def _calls_of(testimony: Testimony, name: str, number: int, is_default: bool) -> _Calls | None:
    """A rank's calls in the group to which it has given this number."""
    now, calls = testimony.ring.now(), testimony.ring.calls()
    if now is None:
        return None
    counted = testimony.of("ddp", n=0)  # the ring counts the calls of this model's group, or else of the default one
    counts = counted[0].values["group"] == name if counted else is_default
    own = [call for call in calls if call.group == number]
    return _Calls(own, now, counts=counts, is_complete=len(calls) < CALLS)
