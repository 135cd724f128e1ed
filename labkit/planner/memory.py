"""What a rank holds at the peak of a training step, by formulas: no torch, no process, milliseconds.

A step is a short list of named moments; the peak is the largest. What units hold while they compute is counted once
(see facts.py); added to it is what a strategy holds of parameters, gradients, optimizer state and buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from labkit.planner.facts import Facts, Variant
from labkit.planner.layout import Layout
from labkit.planner.replicating import Whole
from labkit.planner.sharding import Sharded, Sharding, groups_of
from labkit.planner.step import Ledger, backward, forward, loss
from labkit.record.peak import Peak

__all__ = ["adamw_state", "adamw_temporary", "dealt", "moments", "peak", "states", "variant_of"]

SHARDED = ("fsdp", "zero2", "hybrid")


def peak(facts: Facts, layout: Layout, rank: int = 0, *, foreach: bool = False) -> Peak:
    """The largest of the moments of a step, once the optimizer has its state. `foreach`: torch's default on GPUs."""
    return max(moments(facts, layout, rank, foreach=foreach), key=lambda moment: moment.bytes)


def states(facts: Facts, layout: Layout, rank: int = 0) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state when backward is over."""
    at_end = moments(facts, layout, rank)[-1].categories
    return {name: at_end.get(name, 0) for name in ("parameters", "gradients", "optimizer")}


def moments(facts: Facts, layout: Layout, rank: int = 0, *, foreach: bool = False) -> list[Peak]:
    """The largest of each name, in the order of the step; the optimizer's is the last."""
    variant = variant_of(layout)
    profiles, names = facts.profiles[variant][:-1], [unit.name for unit in facts.units]
    size = 8 if layout.precision == "fp64" else 4
    inputs = input_bytes(facts, variant, layout.micro_batch * layout.accumulate)
    ledger = Ledger(activations=inputs)
    frozen = size * sum(unit.frozen for unit in facts.units)
    buffers = sum(unit.buffers for unit in facts.units)
    keeper: Whole | Sharded
    if layout.strategy in SHARDED:
        groups = groups_of(names, profiles, layout.shards, rank % layout.shards)
        keeper = Sharded(ledger, groups, [sum(p.parameters) for p in profiles], sharding_of(layout, variant))
        parameters = size * sum(group.shard for group in set(groups))
        stepped = [n for group in dict.fromkeys(groups) for n in group.local]
        frozen //= layout.shards
    else:
        sizes = [n for profile in profiles for n in profile.parameters]
        views = layout.options.get("gradient_as_bucket_view", True)
        of_units = [size * sum(profile.parameters) for profile in profiles]
        keeper = Whole(ledger, of_units, buckets=layout.strategy in ("ddp", "zero1"), views=views)
        parameters = size * sum(sizes)
        stepped = dealt(sizes, layout.data)[rank] if layout.strategy == "zero1" else sizes
    ledger.held["parameters"] = parameters + frozen + buffers
    ledger.held["optimizer"] = adamw_state(stepped, size)
    # micro-batches in the middle are all alike
    for number in sorted({0, min(1, layout.accumulate - 1), layout.accumulate - 1}):
        keeper.begin(first=number == 0, last=number == layout.accumulate - 1)
        forward(ledger, keeper, names, profiles, layout.micro_batch)
        loss(ledger, facts.profiles[variant][-1], layout.micro_batch)
        backward(ledger, keeper, names, profiles, layout.micro_batch)
    ledger.note("optimizer", "optimizer step", temporary=adamw_temporary(stepped, size, foreach=foreach))
    return list(ledger.moments.values())


def variant_of(layout: Layout) -> Variant:
    """How units compute under a layout. FSDP computes with parameters in 16 bits; the others cast them."""
    half = layout.precision in ("fp16", "bf16")
    return Variant(
        "16" if half else layout.precision,
        half and layout.strategy in (*SHARDED, "fsdp1"),
        layout.activation_checkpointing,
        layout.tensor,
        bool(layout.options.get("sequence_parallel", False)),
    )


def sharding_of(layout: Layout, variant: Variant) -> Sharding:
    """What the scripts' strategy cells ask of fully_shard."""
    computing, reducing = variant.itemsize, max(4, variant.itemsize)
    if layout.strategy == "zero2":
        return Sharding(layout.shards, computing, reducing, blocks_after_forward=False, kept_between=True)
    reshard = layout.options["reshard_after_forward"]
    return Sharding(
        layout.shards,
        computing,
        reducing,
        blocks_after_forward=reshard != "never",
        root_after_forward=reshard == "always",
        reduced_once=True,
    )


def input_bytes(facts: Facts, variant: Variant, samples: int) -> int:
    """Of so many samples of x and y, which stay for the whole step."""
    wider = facts.profiles[variant][0].input.at(1) - facts.profiles[Variant()][0].input.at(1)
    return samples * (facts.inputs + wider)


def adamw_state(sizes: Sequence[int], itemsize: int) -> int:
    """Two moments of each parameter, and its step as a float32. Source: torch.optim.AdamW; 8 bytes per fp32
    parameter, as in ZeRO (1910.02054 sec. 3.1) without the fp32 copy of the weights, which are fp32 already.
    """
    return 2 * itemsize * sum(sizes) + 4 * len(sizes)


def adamw_temporary(sizes: Sequence[int], itemsize: int, *, foreach: bool) -> int:
    """What a step of AdamW needs beside its state. Source: torch/optim/adamw.py.

    Of all parameters at once (foreach): the root of the second moments. One by one: that root, the root divided,
    and still the divided root of the parameter before.
    """
    if foreach:
        return itemsize * sum(sizes)
    return itemsize * max((before + 2 * size for before, size in pairwise([0, *sizes])), default=0)


def dealt(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The parameters each rank steps under ZeRO-1: the largest first, to the rank with the fewest elements.

    Source: torch.distributed.optim.ZeroRedundancyOptimizer._partition_parameters.
    """
    each: list[list[int]] = [[] for _ in range(ranks)]
    for size in sorted(sizes, reverse=True):
        min(each, key=sum).append(size)
    return each
