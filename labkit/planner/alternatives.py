"""What else a strategy can do with the same ranks, and what makes a training smaller: options in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from labkit.planner.devices import Device
from labkit.planner.layout import Layout

__all__ = ["Change", "half_of", "remedies", "ways"]

Change = tuple[dict[str, Any], tuple[str, ...]]  # options, and the words for them

HALF = ("bf16", "fp16")  # bf16 first: it needs no loss scale
MICRO_BATCHES_A_STAGE = 4  # with so many the bubble of GPipe and 1F1B is under a fifth: (p-1)/(4p+p-1)
BOX = 8  # tensor ranks talk in every layer: they stay within a box
MOST_STAGES = 64
MOST_PIECES = 256  # into which a batch is cut before another remedy is looked for


def ways(strategy: str, ranks: int, accumulate: int, box: int = BOX) -> Iterator[Change]:
    """Options of a strategy's own that are worth considering, where `box` ranks share a host."""
    if strategy == "pipeline":
        for count in dict.fromkeys((accumulate, max(accumulate, MICRO_BATCHES_A_STAGE * ranks))):
            for schedule in ("GPipe", "1F1B", "Interleaved1F1B"):
                more, said = _micro_batches(count, accumulate)
                yield {"schedule": schedule} | more, (schedule, *said)
    elif strategy == "hybrid":
        if not any(_axes(ranks, box)):  # it trains all the same, along one axis
            yield {"tensor": 1, "pipeline": 1}, (f"{ranks} data",) if ranks > 1 else ()
        for tensor, pipeline in _axes(ranks, box):
            count = max(accumulate, MICRO_BATCHES_A_STAGE * pipeline) if pipeline > 1 else accumulate
            more, said = _micro_batches(count, accumulate)
            schedule = {"schedule": "1F1B"} if pipeline > 1 else {}
            sizes = {"data": ranks // (tensor * pipeline), "tensor": tensor, "pipeline": pipeline}
            axes = " x ".join(f"{size} {axis}" for axis, size in sizes.items() if size > 1)
            yield {"tensor": tensor, "pipeline": pipeline} | schedule | more, (axes, *said)
    else:
        yield {}, ()
        if strategy == "fsdp":
            yield {"reshard_after_forward": "never"}, ("reshard never",)
            if ranks > box > 1 and ranks % box == 0:
                yield {"replicas": ranks // box}, (f"{ranks // box} replicas",)
        elif strategy == "fsdp1":
            yield {"sharding_strategy": "SHARD_GRAD_OP"}, ("SHARD_GRAD_OP",)


def remedies(layout: Layout, device: Device) -> Iterator[tuple[dict[str, Any], str]]:
    """What would make a rank hold less, the cheapest in time first."""
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


def half_of(device: Device) -> str | None:
    """The precision of 16 bits to take there; None where there is none."""
    return next((precision for precision in HALF if precision in device.precisions), None)


def _micro_batches(count: int, asked: int) -> tuple[Mapping[str, int], tuple[str, ...]]:
    return ({}, ()) if count == asked else ({"accumulate": count}, (f"accumulate={count}",))


def _axes(ranks: int, box: int) -> Iterator[tuple[int, int]]:
    """(tensor, pipeline) with at least two of the three axes in use: with one it is much like another strategy."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for tensor in (n for n in divisors if n <= min(BOX, box) and (box % n == 0 or ranks <= box)):
        for pipeline in (n for n in divisors if ranks % (tensor * n) == 0 and n <= MOST_STAGES):
            if sum(n > 1 for n in (tensor, pipeline, ranks // (tensor * pipeline))) >= 2:
                yield tensor, pipeline
