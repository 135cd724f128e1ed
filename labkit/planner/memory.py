"""What a rank holds at the peak of a training step, by closed formulas: no torch, no process, milliseconds.

A step is a short list of moments; the peak is the largest. What units hold while they compute is counted once (see
facts.py); here it is added to what a strategy holds of parameters, gradients, optimizer state and buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from labkit.planner.computing import Point, computing, input_bytes, variant_of
from labkit.planner.facts import Facts
from labkit.planner.layout import Layout
from labkit.record.peak import Peak

__all__ = ["moments", "peak", "states"]


def peak(facts: Facts, layout: Layout, rank: int = 0, *, foreach: bool = False) -> Peak:
    """The largest of the moments of a step, once the optimizer has its state. `foreach`: torch's default on GPUs."""
    return max(moments(facts, layout, rank, foreach=foreach), key=lambda moment: moment.bytes)


def states(facts: Facts, layout: Layout, rank: int = 0) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state at the end of backward."""
    at_end = moments(facts, layout, rank)[-1].categories
    return {name: at_end.get(name, 0) for name in ("parameters", "gradients", "optimizer")}


def moments(facts: Facts, layout: Layout, rank: int = 0, *, foreach: bool = False) -> list[Peak]:
    """In the order of the step; the optimizer's is the last."""
    if layout.strategy in ("", "single", "ddp", "zero1"):
        return _whole(facts, layout, rank, foreach)
    raise NotImplementedError(layout.strategy)


def adamw_state(sizes: Sequence[int], itemsize: int) -> int:
    """Two moments of each parameter, and its step as a float32. Source: torch.optim.AdamW; 8 bytes per fp32
    parameter as in ZeRO (1910.02054 sec. 3.1) without the fp32 copy of the weights, which are fp32 already.
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


def _whole(facts: Facts, layout: Layout, rank: int, foreach: bool) -> list[Peak]:
    """Strategies under which each rank has all parameters and gradients: single, ddp, zero1."""
    variant = variant_of(layout)
    profiles, samples = facts.profiles[variant], layout.micro_batch
    names = [*(unit.name for unit in facts.units), "loss"]
    size = 8 if layout.precision == "fp64" else 4
    sizes = [n for unit in facts.units for n in unit.parameters]
    parameters = size * (sum(sizes) + sum(unit.frozen for unit in facts.units)) + sum(u.buffers for u in facts.units)
    stepped = dealt(sizes, layout.data)[rank] if layout.strategy == "zero1" else sizes
    optimizer = adamw_state(stepped, size)
    inputs = input_bytes(facts, variant, samples * layout.accumulate)
    all_gradients = size * sum(sizes)
    replicated = layout.strategy in ("ddp", "zero1")
    views = layout.options.get("gradient_as_bucket_view", True)
    buckets = all_gradients if replicated else 0

    def at(phase: str, what: str, activations: int, temporary: int, gradients: int) -> Peak:
        held = {
            "parameters": parameters,
            "gradients": gradients + (buckets if views else 0),
            "optimizer": optimizer,
            "communication": 0 if views else buckets,
            "activations": inputs + activations,
            "temporary": temporary,
        }
        return Peak(sum(held.values()), phase, what, {name: n for name, n in held.items() if n})

    # Gradients that are complete, by whether this is the first micro-batch of the step and whether it is the last.
    def complete(point: Point, first: bool, last: bool) -> int:
        before = 0 if first else all_gradients
        if replicated and views and last:  # each moves to its bucket as soon as it is complete
            return before - (0 if first else point.settled)
        return point.settled if first else before

    kinds = {(n == 0, n == layout.accumulate - 1): None for n in range(layout.accumulate)}
    step = [
        at(point.phase, point.operation, point.activations, point.temporary, complete(point, *kind))
        for kind in kinds
        for point in computing(names, profiles, samples, size)
    ]
    kept = 0 if replicated and views else all_gradients
    temporary = adamw_temporary(stepped, size, foreach=foreach)
    return [*step, at("optimizer", "optimizer step", 0, temporary, kept)]
