"""What strategies have in common that shard parameters, gradients and optimizer state with FSDP2's fully_shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.planner.memory.fsdp import FullyShard, Sharding, groups_of
from labkit.planner.memory.ledger import Keeper, Ledger
from labkit.planner.model.facts import ModelFacts, Unit
from labkit.planner.speed.collectives import Collective
from labkit.planner.strategies.strategy import Layout, Strategy


class Sharded(Strategy):
    halves_parameters = True
    has_dtensors = True
    frees_later = "gathered parameters"

    def shards(self, layout: Layout) -> int:
        return layout.ranks

    def shards_of(self, unit: Unit, layout: Layout) -> tuple[int, ...]:
        """The number of ranks that share each parameter that a rank computes with."""
        return (layout.shards,) * len(unit.parameters)

    def apart(self, facts: ModelFacts, layout: Layout) -> int:
        """Elements of blocks that are not gathered from all ranks."""
        return 0

    def sharding(self, layout: Layout) -> Sharding:
        """The settings that its script passes to fully_shard, and how long what is gathered and reduced is held."""
        reshard = layout.options.get("reshard_after_forward", "auto")
        return Sharding(blocks_after_forward=reshard != "never", root_after_forward=reshard == "always")

    def refusal(self, facts: ModelFacts, layout: Layout) -> str:
        if layout.shards > 1 and facts.scalar:
            return f"FSDP does not shard scalar parameters: give {facts.scalar} the shape (1,)"
        return ""

    def keep(
        self, ledger: Ledger, facts: ModelFacts, layout: Layout, units: Sequence[int], rank: int, *, on_gpu: bool
    ) -> tuple[Keeper, list[int]]:
        every, names = self.profiles(facts, layout), [facts.units[unit].name for unit in units]
        profiles = [every[unit] for unit in units]
        shards = [self.shards_of(facts.units[unit], layout) for unit in units]
        frozen = [facts.units[unit].frozen_bytes(layout.itemsize, layout.computed_itemsize) for unit in units]
        size = layout.variant.itemsize
        computed = [facts.units[unit].frozen_bytes(size, size) for unit in units]
        groups = groups_of(names, profiles, [*zip(frozen, computed, strict=True)], shards, rank % layout.shards)
        offloaded = layout.keeps_states_on_host(on_gpu=on_gpu)
        ledger.held["parameters"] += sum(facts.units[unit].buffers for unit in units)
        if not offloaded:
            ledger.held["parameters"] += layout.itemsize * sum(group.shard for group in set(groups))
            ledger.held["parameters"] += sum(frozen) // layout.shards
        keeper = FullyShard(
            ledger,
            groups,
            [sum(profile.parameters) for profile in profiles],
            self.sharding(layout),
            ranks=layout.shards,
            itemsize=layout.variant.itemsize,
            offloaded=offloaded,
        )
        return keeper, [n for group in dict.fromkeys(groups) for n in group.local]

    def exchanged(self, facts: ModelFacts, layout: Layout, rank: int) -> Iterator[Collective]:
        yield from gathered_and_reduced(facts, layout, self.sharding(layout), self.apart(facts, layout))

    def passed_on(self, facts: ModelFacts, layout: Layout) -> int:
        """FSDP casts a block's input."""
        return layout.computed_itemsize


def gathered_and_reduced(
    facts: ModelFacts, layout: Layout, how: Sharding, apart: int = 0, *, wraps_blocks: bool = True
) -> Iterator[Collective]:
    """Each unit is gathered before use, and its gradients are reduce-scattered, all but `apart` elements of the blocks.

    L blocks and a root make 2(L+1) all-gathers with reshard_after_forward, 2(L+1)-1 if the root stays gathered, L+1 if
    all stay gathered, and L+1 reduce-scatters.
    """
    blocks, root = (facts.blocks, facts.ends) if wraps_blocks else ((), facts.units)
    ranks, size = layout.shards, layout.computed_itemsize
    forwards = 1 if how.kept_between else layout.accumulate
    inner, outer = (
        sum(unit.trained * size + unit.frozen_bytes(size, size) for unit in units) for units in (blocks, root)
    )
    whole = [(inner - apart * size) * forwards, outer * forwards]
    # The first all-gather of a forward cannot overlap with computation; all others do.
    yield Collective("all_gather", ranks, whole[1], forwards, "forward", False)
    yield Collective("all_gather", ranks, whole[0], len(blocks) * forwards, "forward", True)
    if how.blocks_after_forward:
        yield Collective("all_gather", ranks, whole[0], len(blocks) * forwards, "backward", True)
    if how.root_after_forward:
        yield Collective("all_gather", ranks, whole[1], forwards, "backward", False)
    yield from reduced(facts, "reduce_scatter", ranks, 1 if how.reduced_once else layout.accumulate, blocks, apart)
    if layout.data > ranks:  # each rank its shard, across the replicas
        copies, shard = layout.data // ranks, facts.elements * facts.itemsize // ranks
        yield Collective("all_reduce", copies, shard, len(blocks) + 1, "backward", True, stride=ranks)


def reduced(
    facts: ModelFacts, kind: str, ranks: int, times: int, blocks: Sequence[Unit], apart: int = 0
) -> Iterator[Collective]:
    """Gradients are reduced in the parameters' precision. The root's come last, because its embedding is the first
    layer."""
    inner = sum(unit.trained for unit in blocks)
    sizes = [n * facts.itemsize * times for n in (inner - apart, facts.elements - inner)]
    yield Collective(kind, ranks, sizes[0], len(blocks) * times, "backward", True)
    yield Collective(kind, ranks, sizes[1], times, "backward", False)
