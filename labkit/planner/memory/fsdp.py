"""Computes the memory of a rank under FSDP2 (ZeRO-2 and ZeRO-3): shards always; for a group of parameters (a block, or
the root: everything outside of blocks) the gathered parameters during computation, an all-gather buffer and a reduction
buffer.

Source of the order of events: torch/distributed/fsdp/_fully_shard of torch 2.13, _fsdp_param_group.py (unshard,
wait_for_unshard, reshard, post_backward, _backward_prefetch) and _fsdp_collectives.py (foreach_all_gather,
foreach_reduce). Source of the sharding: ZeRO (1910.02054 sec. 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.planner.memory.ledger import Keeper, Ledger
from labkit.planner.model.facts import Profile
from labkit.version import torch_release

# Since torch 2.15 the previous group's all-gather buffer is freed before the next one is made
# (release_all_gather_state_for_comm_reuse), before that afterwards (wait_for_unshard).
RELEASES_FIRST = torch_release() >= (2, 15)
ROOT = "the root"


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered, and whose gradients are reduced, together. Sizes are in elements of those that are
    trained; `frozen` is in bytes."""

    name: str
    elements: int
    shard: int  # per rank: every parameter's first dimension is rounded up to a multiple of the ranks
    whole: int  # gathered
    local: tuple[int, ...]  # per parameter on this rank, as the optimizer sees it
    frozen: int  # the shards of all ranks
    frozen_computed: int  # gathered


def groups_of(
    names: Sequence[str],
    profiles: Sequence[Profile],
    frozen: Sequence[tuple[int, int]],
    ranks: Sequence[Sequence[int]],
    rank: int,
) -> list[Group]:
    """The group of each unit: a block has its own; all others are in the root. `frozen` has the bytes of each unit's
    parameters that are not trained, as stored and as computed with; `ranks` says over how many ranks each unit's
    parameters are sharded."""
    keys = [name if name.startswith("blocks.") else ROOT for name in names]
    groups = {}
    for key in dict.fromkeys(keys):
        members = [i for i, of in enumerate(keys) if of == key]
        shapes = [pair for i in members for pair in zip(profiles[i].parameters, profiles[i].rows, strict=True)]
        over = [n for i in members for n in ranks[i]]  # a shared parameter may be another member's there
        cuts = [(size // max(1, rows), rows, -(-rows // n), n) for (size, rows), n in zip(shapes, over, strict=True)]
        groups[key] = Group(
            key,
            elements=sum(size for size, _ in shapes),
            shard=sum(row * cut for row, _, cut, _ in cuts),
            whole=sum(row * cut * n for row, _, cut, n in cuts),
            local=tuple(row * max(0, min(cut, rows - rank % n * cut)) for row, rows, cut, n in cuts),
            frozen=sum(frozen[i][0] for i in members),
            frozen_computed=sum(frozen[i][1] for i in members),
        )
    return [groups[key] for key in keys]


@dataclass(frozen=True)
class Sharding:
    """How long what FSDP gathers and reduces is held."""

    blocks_after_forward: bool  # freed after forward, gathered again for backward
    root_after_forward: bool = False
    kept_between: bool = False  # gathered once per step instead of once per micro-batch
    reduced_once: bool = True  # gradients stay unreduced until the last micro-batch


class FullyShard(Keeper):
    """`groups` has the group of each unit, `elements` the number of its parameters' elements; `itemsize` is that of the
    parameters in computation. With `offloaded`, shards and their gradients are in the host's memory."""

    def __init__(
        self,
        ledger: Ledger,
        groups: Sequence[Group],
        elements: Sequence[int],
        how: Sharding,
        *,
        ranks: int,
        itemsize: int,
        offloaded: bool,
    ):
        self.ledger, self.groups, self.elements, self.how = ledger, groups, elements, how
        self.ranks, self.offloaded = ranks, offloaded
        self.computed, self.reduced_in = itemsize, max(4, itemsize)  # bytes per element
        self.root = next((group for group in groups if group.name == ROOT), None)
        self.whole: set[Group] = set()
        self.accumulated: set[Group] = set()  # with unreduced gradients in the reduction type
        self.reduced: set[Group] = set()
        self.gathering: Group | None = None  # the owner of the all-gather buffer
        self.reducing = 0  # bytes of the last reduction's input
        self.raw: dict[Group, int] = dict.fromkeys(groups, 0)  # bytes of this micro-batch's complete gradients

    def begin(self, *, first: bool, last: bool) -> None:
        if first:
            self.reduced = set()
        self.free = last or not self.how.kept_between
        self.reduce_now = last or not self.how.reduced_once

    def before_forward(self, unit: int, incoming: int) -> None:
        if unit == 0 and self.root:
            self._unshard(self.root, "forward", incoming)
        self._unshard(self.groups[unit], "forward", incoming)

    def after_forward(self, unit: int) -> None:
        if self.groups[unit] is not self.root and self.how.blocks_after_forward:
            self._reshard(self.groups[unit])

    def end_of_forward(self) -> None:
        self._buffer(None)
        if self.root and self.how.root_after_forward:
            self._reshard(self.root)

    def before_backward(self, unit: int, incoming: int) -> None:
        group, is_last = self.groups[unit], unit == len(self.groups) - 1
        if is_last and self.root:
            self._unshard(self.root, "backward", incoming)
        if group is not self.root:
            self._unshard(group, "backward", incoming)
        if unit and (is_last or group is not self.root):
            self._prefetch(self.groups[unit - 1])
        self.unit = unit

    def more_gradients(self, settled: int) -> int:
        """Gradients stay as autograd made them until the group's backward ends, or are added to earlier ones."""
        group = self.groups[self.unit]
        return 0 if group in self.accumulated and self.computed == self.reduced_in else settled

    def after_backward(self, unit: int, result: int) -> None:
        group = self.groups[unit]
        raw = self.more_gradients(self.computed * self.elements[unit])
        self.raw[group] += raw
        self.ledger.held["gradients"] += raw
        if group is not self.root or unit == 0:
            self._post_backward(group, result)
        if unit == 0:
            self._buffer(None)
            self._reduction(0)

    def end_of_step(self) -> None:
        self.free = self.reduce_now = True
        for group in dict.fromkeys([*([self.root] if self.root else []), *self.groups]):
            if group in self.whole:
                self._post_backward(group, 0)
        self._reduction(0)

    def _post_backward(self, group: Group, result: int) -> None:
        held, raw = self.ledger.held, self.raw[group]
        self.raw[group] = 0
        if group in self.accumulated:
            held["gradients"] -= raw  # added to the existing ones
            raw = self._accumulated(group)
        if self.free:
            self._reshard(group)
        if not self.reduce_now:
            held["gradients"] += self._accumulated(group) - raw
            self.accumulated.add(group)
            return
        self._reduction(0)
        shard = self.reduced_in * group.shard
        what = f"reducing the gradients of {group.name}"
        whole = self.reduced_in * group.whole
        self.ledger.note("backward", what, communication=whole, temporary=result)
        held["gradients"] -= raw
        self.accumulated.discard(group)
        self._reduction(whole)
        if group not in self.reduced and not self.offloaded:
            held["gradients"] += shard
            self.reduced.add(group)

    def _reduction(self, size: int) -> None:
        """Hold the input of a reduction until the next reduction."""
        self.ledger.held["communication"] += size - self.reducing
        self.reducing = size

    def _unshard(self, group: Group, phase: str, incoming: int) -> None:
        if group in self.whole:
            return
        held, whole = self.ledger.held, self._whole(group)
        if phase == "forward" and RELEASES_FIRST:
            self._buffer(None)
        if self.gathering is not group:
            copied = self.offloaded or self.computed != self.reduced_in  # to the device or another type
            cast = self.computed * group.shard if copied else 0
            if self.offloaded or group.frozen != group.frozen_computed:
                cast += group.frozen_computed // self.ranks
            more = self._gathered(group) + cast
            self.ledger.note(phase, f"gathering {group.name}", communication=more, temporary=incoming)
            if phase == "backward":
                self._prefetch(group)
        # in forward a buffer is held until the next group's
        beside = self._gathered(group) if phase == "forward" and self.gathering is not group else 0
        self.ledger.note(phase, f"gathering {group.name}", communication=beside + whole, temporary=incoming)
        self._buffer(group if phase == "forward" else None)
        held["communication"] += whole
        self.whole.add(group)

    def _prefetch(self, group: Group) -> None:
        if group not in self.whole:
            self._buffer(group)

    def _buffer(self, group: Group | None) -> None:
        """Make this group the owner of the all-gather buffer."""
        self.ledger.held["communication"] += self._gathered(group) - self._gathered(self.gathering)
        self.gathering = group

    def _gathered(self, group: Group | None) -> int:
        return self._whole(group) if group and self.ranks > 1 else 0

    def _accumulated(self, group: Group) -> int:
        """Bytes of a group's gradients while they wait for the last micro-batch."""
        return self.reduced_in * group.elements

    def _whole(self, group: Group) -> int:
        return self.computed * group.whole + group.frozen_computed

    def _reshard(self, group: Group) -> None:
        self.ledger.held["communication"] -= self._whole(group)
        self.whole.remove(group)
