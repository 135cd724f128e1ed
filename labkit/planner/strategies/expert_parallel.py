"""Expert parallelism: ranks hold different experts and send tokens to them (GShard, arXiv 2006.16668); with FSDP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from labkit.planner.model.facts import ModelFacts, Profile, Unit
from labkit.planner.speed.collectives import COUNT, Collective
from labkit.planner.strategies.sharded import Sharded
from labkit.planner.strategies.strategy import Axes, Layout, Way, divided_evenly


class ExpertParallel(Sharded):
    name, simplicity = "expert_parallel", 10
    for_some = True  # models with experts
    updates_singly = True

    def axes(self, ranks: int, values: Mapping[str, Any]) -> Axes:
        experts = values["expert_ranks"] or ranks
        divided_evenly(ranks, experts, f"replicas of expert_ranks={experts}")
        return Axes()

    def shards_of(self, unit: Unit, layout: Layout) -> tuple[int, ...]:
        """Experts are shared only with their replicas."""
        if _expert_ranks(layout) == 1:
            return super().shards_of(unit, layout)
        replicas = layout.ranks // _expert_ranks(layout)
        return tuple(replicas if i in unit.experts else layout.shards for i in range(len(unit.parameters)))

    def ways(self, ranks: int, accumulate: int, samples: int, box: int) -> Iterator[Way]:
        yield {}, ()
        for experts in (n for n in range(2, min(box + 1, ranks)) if ranks % n == 0):  # tokens stay within a host
            yield {"expert_ranks": experts}, (f"expert_ranks={experts}",)

    def refusal(self, facts: ModelFacts, layout: Layout) -> str:
        if reason := super().refusal(facts, layout) or facts.undivided:
            return reason
        ranks = _expert_ranks(layout)
        replicas = layout.ranks // ranks
        for number, features in (size for unit in facts.units for size in unit.expert_sizes):
            if number % ranks:
                return f"{number} experts cannot be split across {ranks} expert ranks"
            if features % replicas:
                return f"{features:,} features of the experts cannot be split across {replicas} replicas"
        return ""

    def stretched(self, facts: ModelFacts, layout: Layout, ranks: int) -> Layout | None:
        longer = super().stretched(facts, layout, ranks)
        if longer is None or ranks % _expert_ranks(longer):
            return None
        numbers = (number for unit in facts.units for number, _ in unit.expert_sizes)
        return None if any(number % _expert_ranks(longer) for number in numbers) else longer

    def profiles(self, facts: ModelFacts, layout: Layout) -> Sequence[Profile]:
        whole, ranks = super().profiles(facts, layout), _expert_ranks(layout)
        if ranks == 1:
            return whole
        units = zip(whole[:-1], facts.units, strict=True)
        return [*(_with_some_experts(each, unit, ranks) if unit.experts else each for each, unit in units), whole[-1]]

    def apart(self, facts: ModelFacts, layout: Layout) -> int:
        return sum(unit.of_experts for unit in facts.blocks) if _expert_ranks(layout) > 1 else 0

    def exchanged(self, facts: ModelFacts, layout: Layout, rank: int) -> Iterator[Collective]:
        """For each mixture, a rank sends how many rows go to each expert, then the rows to the ranks of their experts,
        which send the results back, and in backward their gradients (section 3.2). It assumes a router that divides its
        tokens evenly; the number of rows over all ranks is the same for any router. With replicas of the experts, FSDP
        gathers and reduce-scatters each rank's among them."""
        yield from super().exchanged(facts, layout, rank)
        ranks, replicas = _expert_ranks(layout), layout.ranks // _expert_ranks(layout)
        units = [unit for unit in facts.units if unit.routed] if ranks > 1 else []
        calls, again = len(units) * layout.accumulate, int(layout.activation_checkpointing)
        size = layout.computed_itemsize
        rows = sum(unit.routed for unit in units) * layout.micro_batch * layout.accumulate * size
        for phase, times in (("forward", 1), ("backward", again)):
            counts = COUNT * facts.experts * calls * times
            yield Collective("all_to_all", ranks, counts, calls * times, phase, False)
        yield Collective("all_to_all", ranks, 2 * rows, 2 * calls, "forward", False)
        yield Collective("all_to_all", ranks, 2 * (1 + again) * rows, 2 * (1 + again) * calls, "backward", False)
        whole = sum(unit.of_experts for unit in units) // ranks
        for phase in ("forward", "backward"):
            gathered = whole * size * layout.accumulate
            yield Collective("all_gather", replicas, gathered, calls, phase, True, ranks)
        yield Collective("reduce_scatter", replicas, whole * facts.itemsize, len(units), "backward", True, ranks)

    def assumed(self, layout: Layout) -> Iterator[str]:
        if _expert_ranks(layout) > 1:
            yield "a router that divides its tokens evenly"

    def hint(self, facts: ModelFacts) -> str:
        if not facts.experts or self.name in facts.divides:
            return ""
        return (
            "Expert parallelism would divide the experts among ranks and send tokens instead of parameters; labkit has "
            "it for modules named experts that take rows sorted by expert (expert_parallel, task mixture)."
        )


def _expert_ranks(layout: Layout) -> int:
    """Ranks that divide the experts; the others hold replicas of them."""
    return layout.options["expert_ranks"] or layout.ranks


def _with_some_experts(profile: Profile, unit: Unit, ranks: int) -> Profile:
    """The experts of one rank, which get as many rows as all experts would from one rank. Bytes that do not depend on
    the samples are those of gradients, nearly all of experts."""
    sizes = tuple(n // ranks if i in unit.experts else n for i, n in enumerate(profile.parameters))
    rows = tuple(n if i in unit.experts else row for i, (n, row) in enumerate(zip(sizes, profile.rows, strict=True)))
    share = sum(sizes) / sum(profile.parameters)
    moments: dict[str, Any] = {
        name: tuple(
            m._replace(held=m.held._replace(fixed=int(m.held.fixed * share)), settled=int(m.settled * share))
            for m in getattr(profile, name)
        )
        for name in ("forward", "backward")
    }
    return replace(profile, parameters=sizes, rows=rows, **moments)
