"""Compares the collectives that ranks have called, as torch's flight recorder lists them.

A host may run ahead of its GPU, so the newest call proves little: ranks are compared call by call within each process
group, and a rank waits in the oldest call that has not completed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.witness import two_parties

DEFAULT_GROUP = "default_pg"
UNNAMED = (DEFAULT_GROUP, "undefined", "")
# Ranks may pass different sizes to these.
UNEVEN = ("all_to_all", "gather", "scatter")


@dataclass(frozen=True)
class RecordedCall:
    """A collective that a rank has called. `group` identifies the process group, even if two backends share a name;
    `number` counts the calls in it; `created` is in ns since the epoch."""

    group: tuple[str, ...]
    label: str
    number: int
    name: str
    shapes: str
    completed: bool
    created: int

    @property
    def in_default_group(self) -> bool:
        return self.label in (DEFAULT_GROUP, "")

    @property
    def group_in_words(self) -> str:
        """` of group `model``, empty if it has no name of its own."""
        return "" if self.label in UNNAMED else f" of group `{self.label}`"

    def __str__(self) -> str:
        return f"`{self.name}` #{self.number}{self.group_in_words}"


def calls_of(entries: Any) -> list[RecordedCall]:
    """A rank's collectives, oldest first, from the entries of a flight recorder, without point-to-point messages."""
    entries = entries if isinstance(entries, list) else []
    calls = [_call(entry) for entry in entries if isinstance(entry, dict) and not entry.get("is_p2p")]
    return sorted(calls, key=lambda call: call.created)


def waits_in(calls: Iterable[RecordedCall]) -> RecordedCall | None:
    """The oldest call that has not completed."""
    return next((call for call in calls if not call.completed), None)


def disagreement(
    calls: Mapping[int, Sequence[RecordedCall]],
) -> tuple[tuple[int, RecordedCall], tuple[int, RecordedCall]] | None:
    """The first call that has the same number in the same group and differs between ranks: two ranks, each with its
    call. None if there is none."""
    of_number: dict[Any, dict[int, RecordedCall]] = {}
    for rank, own in calls.items():
        for call in reversed(own):  # a batch shares a number
            of_number.setdefault((call.group, call.number), {})[rank] = call
    for each in sorted(of_number.values(), key=lambda each: next(iter(each.values())).created):
        are_over = all(call.completed for call in each.values())  # then their sizes may differ
        kinds = {r: (call.name, "" if are_over or call.name in UNEVEN else call.shapes) for r, call in each.items()}
        if parties := two_parties(kinds):
            (rank, *_), (other, *_) = parties
            return (rank, each[rank]), (other, each[other])
    return None


def absent(calls: Mapping[int, Sequence[RecordedCall]]) -> tuple[RecordedCall, list[int]] | None:
    """The oldest pending call that some ranks, which wait in no call, have not entered, and these ranks."""
    waiting = _waiting(calls)
    for call in sorted(waiting.values(), key=lambda call: call.created):
        if ranks := [rank for rank in _behind(call, calls) if rank not in waiting]:
            return call, ranks
    return None


def mutual_waiting(calls: Mapping[int, Sequence[RecordedCall]]) -> list[tuple[int, RecordedCall, list[int]]]:
    """`(rank, call, ranks)` if every rank that others wait for waits itself in another group: the ranks called
    collectives of different groups in different orders."""
    waiting = _waiting(calls)
    edges = [(rank, call, _behind(call, calls)) for rank, call in waiting.items()]
    edges = [edge for edge in edges if edge[2]]
    return edges if all(rank in waiting for *_, ranks in edges for rank in ranks) else []


def _waiting(calls: Mapping[int, Sequence[RecordedCall]]) -> dict[int, RecordedCall]:
    return {rank: call for rank, own in calls.items() if (call := waits_in(own))}


def _behind(awaited: RecordedCall, calls: Mapping[int, Sequence[RecordedCall]]) -> list[int]:
    """The members of the call's group that have not called it. A rank without calls in the group counts as a member
    only of the default group, to which all ranks belong."""
    behind = []
    for rank, own in calls.items():
        numbers = [call.number for call in own if call.group == awaited.group]
        if max(numbers, default=0) < awaited.number and (numbers or awaited.in_default_group or not own):
            behind.append(rank)
    return behind


def _call(entry: Mapping[str, Any]) -> RecordedCall:
    backend, _, name = str(entry.get("profiling_name", "a collective")).rpartition(":")
    group = entry.get("process_group")
    names = [str(part) for part in group] if isinstance(group, list) else [str(group or "")]
    sizes, types = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    number, created = entry.get("collective_seq_id"), entry.get("time_created_ns")
    return RecordedCall(
        group=(backend, str(entry.get("ranks", "")), *names),
        label=names[-1],
        number=number if isinstance(number, int) else 0,
        name=name,
        shapes=", ".join(f"{type} {size}" for type, size in zip(types, sizes, strict=False)),
        completed=entry.get("retired") is not False,
        created=created if isinstance(created, int) else 0,
    )
