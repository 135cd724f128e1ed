"""Lists option values that vary a strategy on the same ranks, and remedies that reduce its memory, with
descriptions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from labkit.planner.data_sheets import Device
from labkit.planner.layout import Layout

__all__ = ["HALF", "Change", "fused_adamw", "half_of", "remedies", "ways"]

Change = tuple[dict[str, Any], tuple[str, ...]]  # options, and their descriptions

HALF = ("bf16", "fp16")  # bf16 first: it needs no loss scale
MICRO_BATCHES_A_STAGE = (4, 2, 1)  # 4 keep the bubble of GPipe and 1F1B below a fifth: (p-1)/(4p+p-1)
BOX = 8  # tensor ranks communicate in every layer, so they stay within a box
MOST_STAGES = 64
MOST_PIECES = 256  # the largest factor by which a batch is divided


def ways(strategy: str, ranks: int, accumulate: int, samples: int, box: int = BOX) -> Iterator[Change]:
    """Values of a strategy's own options that are worth considering for `samples` in a step over all ranks, if `box`
    ranks share a host."""
    if strategy == "pipeline":
        for count in dict.fromkeys((accumulate, _filling(ranks, accumulate, samples))):
            for schedule in ("GPipe", "1F1B", "Interleaved1F1B"):
                more, words = _micro_batches(count, accumulate)
                yield {"schedule": schedule} | more, (schedule, *words)
    elif strategy == "hybrid":
        if not any(_axes(ranks, box)):  # then it trains along one axis
            yield {"tensor": 1, "pipeline": 1}, (f"{ranks} data ranks",) if ranks > 1 else ()
        for tensor, pipeline in _axes(ranks, box):
            count = _filling(pipeline, accumulate, samples * tensor * pipeline // ranks) if pipeline > 1 else accumulate
            more, words = _micro_batches(count, accumulate)
            staged: dict[str, Any] = {"schedule": "1F1B"} if pipeline > 1 else {}
            sizes = {"data": ranks // (tensor * pipeline), "tensor": tensor, "pipeline": pipeline}
            axes = " x ".join(f"{size} {axis}" for axis, size in sizes.items() if size > 1)
            yield {"tensor": tensor, "pipeline": pipeline} | staged | more, (axes, *words)
    else:
        yield {}, ()
        if strategy == "context_parallel":
            for context in (n for n in range(2, ranks) if ranks % n == 0 and n & (n - 1) == 0):
                yield {"context_ranks": context}, (f"context_ranks={context}",)
        elif strategy == "expert_parallel":
            for experts in (n for n in range(2, min(box + 1, ranks)) if ranks % n == 0):  # tokens stay within a host
                yield {"expert_ranks": experts}, (f"expert_ranks={experts}",)
        elif strategy == "fsdp":
            yield {"reshard_after_forward": "never"}, ("reshard never",)
            for shards in (box, 8 * box, 64 * box):  # fewer ranks in a ring, more states on each
                if ranks > shards > 1 and ranks % shards == 0:
                    yield {"replicas": ranks // shards}, (f"{ranks // shards} replicas",)
        elif strategy == "fsdp1":
            yield {"sharding_strategy": "SHARD_GRAD_OP"}, ("SHARD_GRAD_OP",)


def remedies(layout: Layout, device: Device) -> Iterator[tuple[dict[str, Any], str]]:
    """Options that reduce the memory of a rank; those that cost the least time come first."""
    if fused := fused_adamw(layout, device):
        yield fused, "fused AdamW"
    if not layout.activation_checkpointing:
        yield {"activation_checkpointing": True}, "activation checkpointing"
    half = half_of(device)
    if half and layout.precision not in HALF:
        yield {"precision": half}, half
    if layout.options.get("gradient_as_bucket_view") is False:
        yield {"gradient_as_bucket_view": True}, "gradients as bucket view"
    if layout.options.get("reshard_after_forward") in ("auto", "never"):
        yield {"reshard_after_forward": "always"}, "reshard always"
    times = 2
    while times <= min(layout.micro_batch, MOST_PIECES):
        if layout.micro_batch % times == 0:
            yield {"accumulate": layout.accumulate * times}, f"accumulate={layout.accumulate * times}"
        times *= 2
    if layout.options.get("cpu_offload") is False and not device.shared:
        yield {"cpu_offload": True}, "CPU offload"


def fused_adamw(layout: Layout, device: Device) -> dict[str, Any]:
    """The option with which a GPU updates all parameters in one kernel; none for other optimizers than AdamW."""
    offloaded = bool(layout.options.get("cpu_offload"))
    return {"optimizer": "adamw_fused"} if layout.optimizer == "adamw" and not (device.shared or offloaded) else {}


def half_of(device: Device) -> str | None:
    """The preferred 16-bit precision on the device; None if it has none."""
    return next((precision for precision in HALF if precision in device.precisions), None)


def _filling(stages: int, accumulate: int, samples: int) -> int:
    """A number of micro-batches that keeps a pipeline of this many stages busy and divides its samples, at least
    `accumulate`; `accumulate` if there is none."""
    counts = (times * stages for times in MICRO_BATCHES_A_STAGE)
    return max(accumulate, next((count for count in counts if samples % count == 0), accumulate))


def _micro_batches(count: int, accumulate: int) -> Change:
    return ({}, ()) if count == accumulate else ({"accumulate": count}, (f"accumulate={count}",))


def _axes(ranks: int, box: int) -> Iterator[tuple[int, int]]:
    """(tensor, pipeline) with at least two of the three axes in use; with one axis it is like another strategy."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for tensor in (n for n in divisors if n <= min(BOX, box) and (box % n == 0 or ranks <= box)):
        for pipeline in (n for n in divisors if ranks % (tensor * n) == 0 and n <= MOST_STAGES):
            if sum(n > 1 for n in (tensor, pipeline, ranks // (tensor * pipeline))) >= 2:
                yield tensor, pipeline
