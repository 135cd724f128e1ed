"""Computes the peak memory of a rank in a training step by formulas, without torch or processes, in milliseconds.

A step is a short list of named moments; the peak is the largest. The memory of computation is determined once (see
facts.py); the strategy's parameters, gradients, optimizer state and buffers are added to it. Sources for ranks that
hold all gradients: torch/csrc/distributed/c10d/reducer.cpp (they are copied into buckets or, with
gradient_as_bucket_view, live in them); measured: buckets add exactly the bytes of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

from labkit.errors import LaunchError
from labkit.planner.layout import Layout
from labkit.planner.memory.fsdp import Flat, Sharded, Sharding, flat_groups_of, groups_of
from labkit.planner.memory.ledger import Ledger, backward, forward, loss
from labkit.planner.memory.pipeline import Stage, actions, pipelined
from labkit.planner.model.facts import ByteCount, ModelFacts, Moment, Profile, Unit, Variant
from labkit.record import Peak

DEALT_RANKS = 8  # with more ranks the partitions are nearly equal
SHARDED = ("fsdp", "zero2", "hybrid", "context_parallel", "expert_parallel")
COUNT = 8  # bytes of the number of predictions, which ranks sum before they compute


def adamw_state(sizes: Sequence[int], itemsize: int) -> int:
    """Bytes of two moments per parameter element, and of the step, a float32 per parameter. Source: torch.optim.AdamW;
    as in ZeRO (1910.02054 sec. 3.1) without the fp32 copy of the weights, which are fp32 already.
    """
    return 2 * itemsize * sum(sizes) + 4 * len(sizes)


def adamw_temporary(sizes: Sequence[int], itemsize: int, *, foreach: bool) -> int:
    """Bytes of temporaries in a step of AdamW. Source: torch/optim/adamw.py.

    With foreach, the root of the second moments of all parameters. Otherwise, the root and the divided root of one
    parameter, and the divided root of the previous one.
    """
    if foreach:
        return itemsize * sum(sizes)
    return itemsize * max((before + 2 * size for before, size in pairwise([0, *sizes])), default=0)


def dealt(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Sizes of each rank's parameters under ZeRO-1: the largest go first, to the rank with the fewest elements.

    Source: torch.distributed.optim.ZeroRedundancyOptimizer._partition_parameters.
    """
    each: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0, rank) for rank in range(ranks)]
    for size in sorted(sizes, reverse=True):
        elements, rank = heappop(least)
        each[rank].append(size)
        heappush(least, (elements + size, rank))
    return each


class Whole:
    """`sizes` has the bytes of each unit's gradients. With `buckets`, DDP's buckets exist; with `views`, gradients live
    in them."""

    def __init__(self, ledger: Ledger, sizes: Sequence[int], itemsize: int, *, buckets: bool, views: bool):
        self.gradient_itemsize = itemsize
        self.ledger, self.sizes, self.buckets, self.views = ledger, sizes, buckets, views
        if buckets:
            ledger.held["gradients" if views else "communication"] += sum(sizes)

    def begin(self, *, first: bool, last: bool) -> None:
        """Start a micro-batch, which may be the first or the last of its step."""
        self.first = first
        self.into_buckets = self.buckets and self.views and last

    def before_forward(self, unit: int, incoming: int) -> None:
        pass

    def after_forward(self, unit: int) -> None:
        pass

    def end_of_forward(self) -> None:
        pass

    def before_backward(self, unit: int, incoming: int) -> None:
        pass

    def more_gradients(self, settled: int) -> int:
        """Gradients are new in the first micro-batch and later added to the existing ones; a bucket view frees them."""
        return settled * (self.first - self.into_buckets)

    def after_backward(self, unit: int, result: int) -> None:
        self.ledger.held["gradients"] += self.more_gradients(self.sizes[unit])

    def end_of_step(self) -> None:
        pass


def on_rank(profile: Profile, unit: Unit | None, layout: Layout, keys_and_values: int) -> Profile:
    """The profile on one rank; `unit` is None for the loss. `keys_and_values` of a block, in bytes per sample."""
    if layout.context > 1:
        is_block = unit is not None and unit.name.startswith("blocks.")
        return _of_a_part(profile, layout, keys_and_values if is_block else 0)
    if layout.expert_ranks > 1 and unit and unit.experts:
        return _with_some_experts(profile, unit, layout.expert_ranks)
    return profile


def shards_of(unit: Unit, layout: Layout) -> tuple[int, ...]:
    """The number of ranks that share each parameter that a rank computes with; experts are shared only with their
    replicas."""
    replicas = layout.ranks // layout.expert_ranks
    experts = unit.experts if layout.expert_ranks > 1 else ()
    return tuple(replicas if i in experts else layout.shards for i in range(len(unit.parameters)))


def mask_bytes(positions: int, layout: Layout, itemsize: int) -> int:
    """Bytes of the masks of a rank's two chunks of a sequence, (r+1) and (2C-r) chunks wide, which all blocks share."""
    chunk = positions // (2 * layout.context)
    return chunk * chunk * (2 * layout.context + 1) * itemsize


def _of_a_part(profile: Profile, layout: Layout, keys_and_values: int) -> Profile:
    """A part of each sample, and for attention the keys and values of all positions, in bytes a sample. They are kept
    for backward unless they are gathered again, and have gradients."""
    ranks, again = layout.context, layout.activation_checkpointing

    def part(line: ByteCount, more: int = 0) -> ByteCount:
        return ByteCount(line.fixed, line.per_sample // ranks + more)

    def moments(each: tuple[Moment, ...], more: int) -> tuple[Moment, ...]:
        return tuple(Moment(part(m.held, more), part(m.kept, keys_and_values), m.settled) for m in each)

    lines: dict[str, Any] = {name: part(getattr(profile, name)) for name in ("input", "output", "between")}
    return replace(
        profile,
        **lines,
        saved=part(profile.saved, 0 if again else keys_and_values),
        forward=moments(profile.forward, keys_and_values),
        backward=moments(profile.backward, keys_and_values * (1 if again else 2)),
    )


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


class UnknownToFormulas(LaunchError):
    """The formulas do not cover this; only a rehearsal can determine its memory."""


def peak(facts: ModelFacts, layout: Layout, rank: int = 0, *, on_gpu: bool = False) -> Peak:
    """The largest moment of a step after the optimizer has its state.

    With `on_gpu` it is in GPU memory, where AdamW updates all parameters of one mesh at once and offloaded tensors do
    not count.
    """
    return max(moments(facts, layout, rank, on_gpu=on_gpu), key=lambda moment: moment.bytes)


def worst(facts: ModelFacts, layout: Layout, *, on_gpu: bool = False) -> tuple[int, Peak]:
    """The rank that holds most, and its peak. Ranks of a stage differ only in remainders of divisions, which are
    largest on the first rank; the first stage holds the most micro-batches, the last the logits."""
    each = layout.ranks // layout.pipeline  # the pipeline is the outermost axis of the scripts' mesh
    ends = sorted({0, min(1, layout.pipeline - 1), layout.pipeline - 1})
    if layout.strategy == "zero1":  # parameters are not divided: any rank may have most
        ends, each = list(range(min(layout.ranks, DEALT_RANKS))), 1
    peaks = {index * each: peak(facts, layout, index * each, on_gpu=on_gpu) for index in ends}
    rank = max(peaks, key=lambda rank: peaks[rank].bytes)
    return rank, peaks[rank]


def states(facts: ModelFacts, layout: Layout, rank: int = 0) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state after backward."""
    at_end = moments(facts, layout, rank)[-1].categories
    return {name: at_end.get(name, 0) for name in ("parameters", "gradients", "optimizer")}


def moments(facts: ModelFacts, layout: Layout, rank: int = 0, *, on_gpu: bool = False) -> list[Peak]:
    """The largest moment of each name, in the order of the step; the optimizer's is the last.

    Raises LaunchError if the facts do not include this split of layers, or if there are no blocks to recompute or to
    form stages; UnknownToFormulas for what the formulas do not cover.
    """
    variant = variant_of(layout)
    if not layout.strategy:
        raise UnknownToFormulas("the strategy cell is not one of labkit's")
    if layout.selective:
        raise UnknownToFormulas("they do not cover selective checkpointing")
    if layout.options.get("loss_chunk"):
        raise UnknownToFormulas("they do not cover a loss in chunks")
    if layout.options.get("optimizer_in_backward"):
        raise UnknownToFormulas("they do not cover an optimizer that updates in backward")
    if layout.offloads and on_gpu:
        raise UnknownToFormulas("they do not cover activations in host memory")
    if layout.options.get("attention") == "ring":
        raise UnknownToFormulas("they do not cover the scores that a ring of attention holds")
    if layout.options.get("compress", "none") != "none":
        raise UnknownToFormulas(f"they do not cover gradients sent as {layout.options['compress']}")
    if why := facts.uncounted.get((variant.precision, variant.half_parameters)):
        raise UnknownToFormulas(f"without data, the model fails in {layout.precision}: {why}")
    if variant.recomputed and variant._replace(recomputed=False) in facts.profiles and variant not in facts.profiles:
        raise LaunchError("activation checkpointing needs repeated layers such as .blocks; this model has none")
    if variant not in facts.profiles:
        raise LaunchError(facts.unsplit.get(layout.tensor, f"no facts for layers split over {layout.tensor} ranks"))
    size = 8 if layout.precision == "fp64" else 4
    offloaded = on_gpu and bool(layout.options.get("cpu_offload"))
    profiles, names = _profiles(facts, layout), [unit.name for unit in facts.units]
    inputs = input_bytes(facts, variant, layout.micro_batch * layout.accumulate)
    if layout.context > 1:
        inputs += inputs // layout.context + mask_bytes(facts.positions, layout, variant.itemsize)
    ledger = Ledger(activations=inputs, communication=COUNT)
    if layout.strategy in ("pipeline", "hybrid"):
        stepped = _pipeline(ledger, facts, layout, rank, size)
    else:
        keeper, stepped = _keep(ledger, facts, layout, range(len(facts.units)), rank)
        ledger.held["optimizer"] = adamw_state(stepped, size)
        if layout.strategy == "diloco":  # the parameters at the start of a round, and the outer momentum
            ledger.held["optimizer"] += 2 * size * sum(stepped)
        replaced = _replaced_buckets(keeper, layout) if on_gpu else 0
        ledger.held["communication"] += replaced
        if offloaded and isinstance(keeper, Sharded):
            keeper.how = replace(keeper.how, offloaded=True)
            ledger.held |= {"parameters": sum(unit.buffers for unit in facts.units), "optimizer": 0}
        # all micro-batches in the middle are equal
        for number in sorted({0, min(1, layout.accumulate - 1), layout.accumulate - 1}):
            keeper.begin(first=number == 0, last=number == layout.accumulate - 1)
            forward(ledger, keeper, names, profiles[:-1], layout.micro_batch)
            loss(ledger, profiles[-1], layout.micro_batch)
            backward(ledger, keeper, names, profiles[:-1], layout.micro_batch)
        ledger.held["communication"] -= replaced
    ledger.held["communication"] -= COUNT
    if not offloaded:
        together = on_gpu and not layout.updates_singly
        temporary = 0 if layout.is_fused else adamw_temporary(stepped, size, foreach=together)
        ledger.note("optimizer", "optimizer step", temporary=temporary)
    return list(ledger.moments.values())


def _replaced_buckets(keeper: Whole | Sharded, layout: Layout) -> int:
    """Bytes of the buckets of DDP's first step. It replaces them at the start of the second by others, in the order in
    which gradients were ready, but NCCL may hold them until that step's backward: docs/evidence/memory.md."""
    is_static = layout.options.get("static_graph") or not layout.options.get("find_unused_parameters")
    return sum(keeper.sizes) if isinstance(keeper, Whole) and keeper.buckets and is_static else 0


def _profiles(facts: ModelFacts, layout: Layout) -> Sequence[Profile]:
    """The profiles of this rank's part of each unit, and of the loss."""
    variant = variant_of(layout)
    profiles = facts.profiles[variant]
    if layout.context == layout.expert_ranks == 1:
        return profiles
    itemsize = 2 if variant.precision == "16" else variant.itemsize
    units = [*facts.units, None]
    return [
        on_rank(profile, unit, layout, itemsize * facts.keys) for profile, unit in zip(profiles, units, strict=True)
    ]


def _keep(
    ledger: Ledger, facts: ModelFacts, layout: Layout, units: Sequence[int], rank: int
) -> tuple[Whole | Sharded, list[int]]:
    """Add the parameters of some units to the ledger. Returns their keeper and the sizes that the optimizer sees.

    `rank` is along the data axis.
    """
    variant = variant_of(layout)
    size = 8 if layout.precision == "fp64" else 4
    names = [facts.units[unit].name for unit in units]
    each = _profiles(facts, layout)
    profiles = [each[unit] for unit in units]
    ledger.held["parameters"] += sum(facts.units[unit].buffers for unit in units)
    frozen = size * sum(facts.units[unit].frozen for unit in units)
    if layout.strategy in SHARDED:
        shards = [shards_of(facts.units[unit], layout) for unit in units]
        groups = groups_of(names, profiles, shards, rank % layout.shards)
        elements = [sum(profile.parameters) for profile in profiles]
        ledger.held["parameters"] += size * sum(group.shard for group in set(groups)) + frozen // layout.shards
        sizes = [n for group in dict.fromkeys(groups) for n in group.local]
        return Sharded(ledger, groups, elements, sharding_of(layout, variant)), sizes
    if layout.strategy == "fsdp1":
        wrapped = layout.options["wrap"] != "none"
        groups = flat_groups_of(
            names, profiles, layout.shards, rank % layout.shards, 16 // variant.itemsize, wrapped=wrapped
        )
        ledger.held["parameters"] += size * sum(group.shard for group in set(groups)) + frozen // layout.shards
        sizes = [n for group in dict.fromkeys(groups) for n in group.local]
        elements = [sum(profile.parameters) for profile in profiles]
        return Flat(ledger, groups, elements, sharding_of(layout, variant)), sizes
    sizes = [n for profile in profiles for n in profile.parameters]
    ledger.held["parameters"] += size * sum(sizes) + frozen
    keeper = Whole(
        ledger,
        [size * sum(profile.parameters) for profile in profiles],
        size,
        buckets=layout.strategy in ("ddp", "zero1"),
        views=layout.options.get("gradient_as_bucket_view", True),
    )
    return keeper, dealt(sizes, layout.data)[rank] if layout.strategy == "zero1" else sizes


def _pipeline(ledger: Ledger, facts: ModelFacts, layout: Layout, rank: int, size: int) -> list[int]:
    """Record the moments of a pipelined step. Returns the sizes that the optimizer sees."""
    pipeline_rank, inner = divmod(rank, layout.data * layout.tensor)
    mine = sorted(layout.stages_of(pipeline_rank))
    blocks = [i for i, unit in enumerate(facts.units) if unit.name.startswith("blocks.")]
    if facts.layers:
        raise UnknownToFormulas("they cover pipelines only for models of embed, blocks and unembed")
    each, rest = divmod(len(blocks), layout.stages)
    if rest or not each:
        raise LaunchError(f"{len(blocks)} blocks cannot be split into {layout.stages} pipeline stages")
    profiles = facts.profiles[variant_of(layout)]
    stages, stepped = {}, []
    for stage in mine:
        first, last = stage == 0, stage == layout.stages - 1
        units = [
            *([0] if first else []),
            *blocks[stage * each : (stage + 1) * each],
            *([len(blocks) + 1] if last else []),
        ]
        keeper, sizes = _keep(ledger, facts, layout, units, inner // layout.tensor)
        stepped += sizes
        stages[stage] = Stage(
            [facts.units[unit].name for unit in units],
            [profiles[unit] for unit in units],
            keeper,
            first,
            profiles[-1] if last else None,
            layout.precision in ("fp32", "fp64"),
        )
    ledger.held["optimizer"] = adamw_state(stepped, size)
    schedule = layout.options["schedule"]
    order = actions(schedule, layout.pipeline, pipeline_rank, mine, layout.accumulate)
    pipelined(ledger, stages, order, layout.micro_batch, layout.accumulate, schedule)
    return stepped


def variant_of(layout: Layout) -> Variant:
    """The variant of a layout. FSDP computes with 16-bit parameters; the other strategies use autocast."""
    half = layout.precision in ("fp16", "bf16")
    return Variant(
        "16" if half else layout.precision,
        half and layout.strategy in (*SHARDED, "fsdp1"),
        layout.activation_checkpointing,
        layout.tensor,
        bool(layout.options.get("sequence_parallel", False)),
    )


def sharding_of(layout: Layout, variant: Variant) -> Sharding:
    """The settings that the scripts' strategy cells pass to fully_shard."""
    computing, reducing = variant.itemsize, max(4, variant.itemsize)
    if layout.strategy == "fsdp1":
        full = layout.options["sharding_strategy"] == "FULL_SHARD"
        return Sharding(layout.shards, computing, reducing, full, kept_between=not full, reduced_once=True)
    if layout.strategy in ("zero2", "hybrid"):
        once = layout.strategy == "hybrid"  # a pipeline reduces at its end
        return Sharding(
            layout.shards, computing, reducing, blocks_after_forward=False, kept_between=True, reduced_once=once
        )
    reshard = layout.options.get("reshard_after_forward", "auto")
    return Sharding(
        layout.shards,
        computing,
        reducing,
        blocks_after_forward=reshard != "never",
        root_after_forward=reshard == "always",
        reduced_once=True,
    )


def input_bytes(facts: ModelFacts, variant: Variant, samples: int) -> int:
    """Bytes of the inputs and targets of `samples` samples, which are held for the whole step."""
    wider = facts.profiles[variant][0].input.at(1) - facts.profiles[Variant()][0].input.at(1)
    return samples * (facts.inputs + wider)
