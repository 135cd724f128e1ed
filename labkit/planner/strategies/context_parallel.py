"""Context parallelism: ranks split each sequence and gather the keys and values of its attention; FSDP over all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from labkit.planner.memory.ledger import Ledger, UnknownToFormulas
from labkit.planner.model.facts import ByteCount, ModelFacts, Moment, Profile
from labkit.planner.speed.collectives import Collective
from labkit.planner.strategies.sharded import Sharded
from labkit.planner.strategies.strategy import Axes, Layout, Way, divided_evenly


class ContextParallel(Sharded):
    name, simplicity = "context_parallel", 9
    for_some = True  # models with causal attention

    def axes(self, ranks: int, values: Mapping[str, Any]) -> Axes:
        context = values["context_ranks"] or ranks
        return Axes(context=divided_evenly(ranks, context, f"sequences of context_ranks={context}"))

    def ways(self, ranks: int, accumulate: int, samples: int, box: int) -> Iterator[Way]:
        yield {}, ()
        for context in (n for n in range(2, ranks) if ranks % n == 0 and n & (n - 1) == 0):
            yield {"context_ranks": context}, (f"context_ranks={context}",)

    def refusal(self, facts: ModelFacts, layout: Layout) -> str:
        chunks = 2 * layout.context
        if layout.context > 1 and facts.positions % chunks:
            each = f"2 chunks for each of {layout.context} context ranks"
            return f"{facts.positions:,} positions cannot be split into {each}"
        return super().refusal(facts, layout)

    def profiles(self, facts: ModelFacts, layout: Layout) -> Sequence[Profile]:
        whole = super().profiles(facts, layout)
        if layout.context == 1:
            return whole
        itemsize = 2 if layout.variant.precision == "16" else layout.variant.itemsize
        in_blocks = [itemsize * facts.keys if unit.is_block else 0 for unit in facts.units]
        return [_of_a_part(each, layout, kept) for each, kept in zip(whole, [*in_blocks, 0], strict=True)]

    def inputs(self, facts: ModelFacts, layout: Layout) -> int:
        """With a rank's part of them and the masks of its two chunks of a sequence, (r+1) and (2C-r) chunks wide, which
        all blocks share."""
        whole, ranks = super().inputs(facts, layout), layout.context
        if ranks == 1:
            return whole
        chunk = facts.positions // (2 * ranks)
        return whole + whole // ranks + chunk * chunk * (2 * ranks + 1) * layout.variant.itemsize

    def record_step(self, ledger: Ledger, facts: ModelFacts, layout: Layout, rank: int, *, on_gpu: bool) -> list[int]:
        if layout.options["attention"] == "ring":
            raise UnknownToFormulas("they do not cover the scores that a ring of attention holds")
        return super().record_step(ledger, facts, layout, rank, on_gpu=on_gpu)

    def exchanged(self, facts: ModelFacts, layout: Layout, rank: int) -> Iterator[Collective]:
        """Keys and values of each block are gathered, and their gradients reduce-scattered (Llama 3, arXiv 2407.21783,
        section 3.3.2). A ring, where grouped ones are repeated for every head, sends them C-1 times, and in backward
        their gradients C more times."""
        yield from super().exchanged(facts, layout, rank)
        if layout.context == 1:
            return
        calls, again = len(facts.blocks) * layout.accumulate, int(layout.activation_checkpointing)
        size, ranks = layout.computed_itemsize, layout.context
        gathers = layout.options["attention"] == "gather"
        elements = len(facts.blocks) * facts.keys if gathers else 2 * sum(unit.output for unit in facts.blocks)
        whole = elements * layout.micro_batch * layout.accumulate * size
        if gathers:
            yield Collective("all_gather", ranks, whole, calls, "forward", False)
            yield Collective("all_gather", ranks, whole * again, calls * again, "backward", False)
            yield Collective("reduce_scatter", ranks, whole, calls, "backward", False)
            return
        gradients = whole // size * max(4, size)  # added up in fp32 or wider
        there, back = ranks - 1, (ranks - 1) * (1 + again)
        yield Collective("send", 2, there * whole // ranks, there * calls, "forward", True)
        yield Collective("send", 2, back * whole // ranks + gradients, (back + ranks) * calls, "backward", True)

    def assumed(self, layout: Layout) -> Iterator[str]:
        if layout.context > 1:
            yield "attention across ranks at the speed of torch's kernel for whole sequences"


def _of_a_part(profile: Profile, layout: Layout, keys_and_values: int) -> Profile:
    """A part of each sample, and for attention the keys and values of all positions, in bytes a sample. They are kept
    for backward unless they are gathered again, and have gradients."""
    ranks, again = layout.context, layout.activation_checkpointing

    def part(line: ByteCount, more: int = 0) -> ByteCount:
        return ByteCount(line.fixed, line.per_sample // ranks + more)

    def moments(each: tuple[Moment, ...], more: int) -> tuple[Moment, ...]:
        return tuple(Moment(part(m.held, more), part(m.kept, keys_and_values), m.settled) for m in each)

    return replace(
        profile,
        input=part(profile.input),
        output=part(profile.output),
        saved=part(profile.saved, 0 if again else keys_and_values),
        forward=moments(profile.forward, keys_and_values),
        backward=moments(profile.backward, keys_and_values * (1 if again else 2)),
    )
