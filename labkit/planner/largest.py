"""How far a training can grow before it no longer fits: in samples, and in parameters."""

from __future__ import annotations

from dataclasses import replace

from labkit.planner.devices import Device
from labkit.planner.layout import Layout
from labkit.planner.memory.peak import worst
from labkit.planner.model.facts import Facts

__all__ = ["largest_micro_batch", "largest_model"]

MOST_SAMPLES = 1 << 20


def largest_micro_batch(facts: Facts, layout: Layout, device: Device) -> int:
    """Samples per rank and micro-batch up to which the training fits; 0 when not even one does."""
    usable = device.usable_by(layout.ranks)

    def fits(size: int) -> bool:
        return worst(facts, replace(layout, micro_batch=size), on_gpu=not device.shared)[1].bytes <= usable

    low, high = 0, 1
    while high <= MOST_SAMPLES and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_model(layout: Layout, device: Device) -> int:
    """Parameters whose states alone fill the device: an upper bound, activations come on top.

    Bytes per parameter in fp32 with AdamW, 4 of parameter + 4 of gradient + 8 of moments, divided as in ZeRO
    (Rajbhandari et al. 2019, section 5); torch keeps fp32 weights under autocast, so 16 bits change nothing of it.
    """
    n, axes = layout.shards, layout.tensor * layout.pipeline
    if layout.strategy == "zero1":
        size = 8 + 8 / layout.data
    elif layout.strategy == "zero2":
        size = 4 + 12 / n
    else:
        size = 16 / (n * axes)
    if layout.options.get("gradient_as_bucket_view") is False:
        size += 4
    return int(device.usable_by(layout.ranks) / size)
