"""Predicts how long a model's operators take on a GPU, from its data sheet: the roofline model (Williams, Waterman and
Patterson 2009) for each operator, with the fraction of the peak that kernels of its kind reach.

The fractions are fitted to published throughputs: benchmarks/published_speed.py, docs/evidence/published_speed.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.planner.data_sheets import Device
from labkit.planner.model.facts import ModelFacts, Profile, Variant, Work

__all__ = ["SPREAD", "KernelTimes", "kernel_times", "matrix_share"]

# On tensor cores: fractions of what large matrix products reach (Device.reached).
COMPUTED = {"matmul": 0.8, "convolution": 0.7, "depthwise": 0.5, "attention": 0.5, "recurrent": 0.2}
TF32 = 0.67  # of what 16 bits reach, relative to its own peak
PLAIN = 0.9  # of the peak without tensor cores
MOVED = {"depthwise": 0.25}  # fractions of what other operators reach of the bandwidth
SPREAD = 1.5  # the published figures are within this factor of the prediction
SHORTEST = 3e-6  # seconds of a GPU for the smallest kernel
HOST = 8e-6  # seconds in which eager PyTorch launches an operator, with its share of Python


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of a micro-batch on one device: all of forward, all of both phases, both outside of the blocks, and the
    host's part of both, in which it launches operators."""

    forward: float
    both: float
    ends: float
    launching: float


def kernel_times(
    facts: ModelFacts, device: Device, precision: str, samples: float, half_parameters: bool = False
) -> KernelTimes:
    """The longer of the GPU's and the host's time: the host launches operators ahead of the GPU. With `half_parameters`
    it computes in 16 bits as FSDP does, not with autocast alone; the host launches as many casts when it gathers
    parameters."""
    profiles = _profiles(facts, precision, half_parameters)
    names = [unit.name for unit in facts.units] + ["loss"] * (len(profiles) - len(facts.units))
    known: dict[int, dict[str, float]] = {}
    total = {"forward": 0.0, "backward": 0.0}
    ends = 0.0
    for name, profile in zip(names, profiles, strict=True):
        if id(profile) not in known:
            known[id(profile)] = _seconds(profile, device, precision, samples)
        times = known[id(profile)]
        total = {phase: seconds + times[phase] for phase, seconds in total.items()}
        ends += 0.0 if name.startswith("blocks.") else sum(times.values())
    both = sum(total.values())
    works = (work for profile in _profiles(facts, precision, False) for work in profile.work)
    launching = HOST * sum(work.calls for work in works if work.kind != "recurrent")  # cuDNN launches those itself
    longer = max(1.0, launching / both) if both else 1.0
    return KernelTimes(longer * total["forward"], longer * both, longer * ends, launching)


def matrix_share(facts: ModelFacts, device: Device, precision: str, samples: float) -> float:
    """The fraction of the GPU's time in products of matrices."""
    seconds = {False: 0.0, True: 0.0}
    for profile in _profiles(facts, precision, True):
        for work in profile.work:
            seconds[work.kind == "matmul"] += _operator(work, device, precision, samples)
    total = sum(seconds.values())
    return seconds[True] / total if total else 0.0


def _profiles(facts: ModelFacts, precision: str, half_parameters: bool) -> tuple[Profile, ...]:
    is_half = precision in ("fp16", "bf16")
    plain = Variant("16" if is_half else precision)
    return facts.profiles.get(plain._replace(half_parameters=is_half and half_parameters)) or facts.profiles[plain]


def _seconds(profile: Profile, device: Device, precision: str, samples: float) -> dict[str, float]:
    """Seconds of the GPU by phase."""
    return {
        phase: sum(_operator(work, device, precision, samples) for work in profile.work if work.phase == phase)
        for phase in ("forward", "backward")
    }


def _operator(work: Work, device: Device, precision: str, samples: float) -> float:
    assert device.bandwidth is not None
    moving = work.bytes.at(samples) / (device.bandwidth * device.moved * MOVED.get(work.kind, 1.0))
    return work.calls * max(work.flops.at(samples) / _rate(work.kind, device, precision), moving, SHORTEST)


def _rate(kind: str, device: Device, precision: str) -> float:
    """FLOP/s. cuDNN uses TF32 for fp32 by default, cuBLAS does not (torch.backends.cudnn.allow_tf32); GPUs with bf16
    have it, at half of the rate of 16 bits."""
    reached = device.reached * COMPUTED.get(kind, 1.0)
    if precision != "fp32":
        return device.flops[precision] * reached
    if kind in ("convolution", "depthwise", "recurrent") and "bf16" in device.flops:
        return device.flops["bf16"] / 2 * TF32 * reached
    return device.flops["fp32"] * PLAIN
