"""Finds how fast devices compute: measured by a short run on this machine, otherwise assumed from data sheets.

From a data sheet, a model's operators take the time of the roofline model (Williams, Waterman and Patterson 2009) each,
with the fraction of the peak that kernels of its kind reach. The fractions are fitted to published throughputs:
benchmarks/published_speed.py, docs/evidence/published_speed.md.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from labkit.arguments import Parameters, Value
from labkit.errors import LaunchError
from labkit.hardware import hardware
from labkit.link import KINDS, CollectiveTime, Link, load, machine_key, short_run, store
from labkit.planner.contract import able_to
from labkit.planner.data_sheets import Device
from labkit.planner.model.facts import ModelFacts, Profile, Variant, Work
from labkit.planner.speed.collectives import wire
from labkit.planner.strategies.known import simplest
from labkit.planner.variations import under
from labkit.write import Script, command_line

# On tensor cores: fractions of what large matrix products reach (Device.reached).
COMPUTED = {"matmul": 0.8, "convolution": 0.7, "depthwise": 0.5, "attention": 0.5, "recurrent": 0.2}
TF32 = 0.67  # of what 16 bits reach, relative to its own peak
PLAIN = 0.9  # of the peak without tensor cores
MOVED = {"depthwise": 0.25}  # fractions of what other operators reach of the bandwidth
SPREAD = 1.5  # the published figures are within this factor of the prediction
SHORTEST = 3e-6  # seconds of a GPU for the smallest kernel
# Seconds in which eager PyTorch launches an operator, with its share of Python. Assumed: the host of an H100, a virtual
# machine, took 17 to 18 us (docs/evidence/gpu/README.md).
HOST = 8e-6
CALIBRATE = Path(__file__).with_name("calibrate.py")
LIMIT_SECONDS = 120.0
SAMPLES = 1, 4  # of the two micro-batches that are measured
CARRIED_OVER = ("precision", "compile", "deterministic", "data_dir")  # the script options that affect speed
# torch's AdamW with foreach passes over its elements in ten kernels, which read and write 80 bytes of each: counted in
# torch/optim/adamw.py (_multi_tensor_adamw).
OPTIMIZER_BYTES = 80
# Bytes that a block moves, per byte of its output, in the work that each tensor rank repeats: two norms (2 in forward,
# 3 in backward) and two residual sums (3 and 3). Counted.
ALIKE_BYTES = 22
LATENCY = 20e-6  # seconds of a small NCCL collective; assumed


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


def _seconds(
    profiles: Sequence[Profile], device: Device, precision: str, samples: float
) -> Iterator[tuple[float, float]]:
    """Seconds of the GPU in forward and in backward of each of a model's profiles."""
    known: dict[int, tuple[float, float]] = {}  # blocks share theirs
    for profile in profiles:
        if id(profile) not in known:
            phases = {"forward": 0.0, "backward": 0.0}
            for work in profile.work:
                phases[work.phase] += _operator(work, device, precision, samples)
            known[id(profile)] = phases["forward"], phases["backward"]
        yield known[id(profile)]


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


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds of one rank while `ranks` compute at the same time. `both`, `forward` and `ends` are (per micro-batch,
    per sample): forward and backward of the model, forward alone, and forward and backward outside of the blocks.
    `alike` is the part that tensor parallelism does not divide: t ranks need alike + (both - ends - alike) / t for the
    blocks.

    `optimizer` is per element, `copy` per byte. Host work that is independent of sizes: `tensor` and `dtensor` (for a
    sharded one) per parameter and step, `split_pair` per two layers that tensor parallelism splits. `contention`: the
    factor by which computation is slower than on a single rank; `waiting`: seconds that a small all-reduce costs a
    computing rank, which includes waiting for the slowest rank sharing its cores. `cores` are shared by the ranks; None
    if each has its own device; `launching`: the host's part of `both` then, 0 if unknown. `spread` is relative, (below,
    above).
    """

    ranks: int
    both: tuple[float, float]
    forward: tuple[float, float]
    ends: tuple[float, float]
    alike: tuple[float, float]
    optimizer: float
    copy: float
    tensor: float = 0.0
    dtensor: float = 0.0
    split_pair: float = 0.0
    contention: float = 1.0
    waiting: float = 0.0
    cores: int | None = None
    spread: tuple[float, float] = (0.0, 0.0)
    launching: float = 0.0
    assumed: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        """Whether each rank has a device of its own."""
        return self.cores is None

    def slowdown(self, working: float) -> float:
        """How much slower than alone a rank computes while so many compute: proportional once all cores are in use."""
        return 1.0 if self.on_gpu else max(1.0, self.contention * working / self.ranks)

    def shared_by(self, ranks: int) -> Rates:
        """The rates if so many ranks share the cores, instead of those of the measurement."""
        if self.on_gpu or ranks == self.ranks:
            return self
        times = self.slowdown(ranks) / self.slowdown(self.ranks)

        def line(seconds: tuple[float, float]) -> tuple[float, float]:
            return seconds[0] * times, seconds[1] * times

        more = f"{ranks} ranks share {self.cores} cores, measured with {self.ranks}: {times:.1f} times as long"
        return replace(
            self,
            ranks=ranks,
            both=line(self.both),
            forward=line(self.forward),
            ends=line(self.ends),
            alike=line(self.alike),
            optimizer=self.optimizer * times,
            copy=self.copy * times,
            tensor=self.tensor * times,
            dtensor=self.dtensor * times,
            split_pair=self.split_pair * times,
            contention=self.contention * times,
            waiting=self.waiting * max(1.0, times),
            assumed=(*self.assumed, more) if ranks > self.ranks else self.assumed,
        )


def measure_rates(script: Script, ranks: int, parameters: Parameters, samples: tuple[int, int] = SAMPLES) -> Rates:
    """Let `ranks` ranks train the script's model side by side for about 10 seconds, without communication, at two
    micro-batch sizes; cache the result. Raises LaunchError if they cannot."""
    machine = hardware()
    if machine.gpus and ranks > len(machine.gpus):
        raise LaunchError(f"{ranks} ranks cannot be measured on {len(machine.gpus)} GPUs: each rank needs its own")
    options = _carried_over(parameters)
    single = able_to(alone(script), options)
    request = {"small": samples[0], "large": samples[1], "argv": command_line(single, options)}
    with tempfile.TemporaryDirectory(prefix="labkit-rates-") as scratch:
        text = Path(scratch, f"{script.name}.py")
        text.write_text(str(single), encoding="utf-8")
        backend = "nccl" if machine.gpus else "gloo"
        result, problem = short_run(CALIBRATE, ranks, backend, args=[text, json.dumps(request)], seconds=LIMIT_SECONDS)
    if problem:
        raise LaunchError(f"the speed of {script.name}.py on {ranks} ranks could not be measured: {problem}")
    rates = _rates(result, ranks, samples, None if machine.gpus else machine.cores)
    store("rates", _key(script, ranks, parameters, samples), asdict(rates))
    return rates


def remembered_rates(script: Script, ranks: int, parameters: Parameters) -> Rates | None:
    """The cached rates of this model, data and precision, provided that the machine and torch are the same."""
    known = load("rates", _key(script, ranks, parameters, SAMPLES))
    try:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in known.items()} if known else {}
        return Rates(**values) if values else None
    except (TypeError, AttributeError):
        return None


def assumed_rates(
    facts: ModelFacts, device: Device, precision: str, samples: float, half_parameters: bool = False
) -> Rates | None:
    """Rates from a data sheet for micro-batches of this size, with a wide band; None without a data sheet, or for a
    precision that the device does not support or in which the model was not counted.

    An operator takes the longer of the GPU's and the host's time: the host launches operators ahead of the GPU. With
    `half_parameters` it computes in 16 bits as FSDP does, not with autocast alone; the host launches as many casts when
    it gathers parameters."""
    is_uncounted = (precision if precision == "fp32" else "16", False) in facts.uncounted
    if precision not in device.flops or device.bandwidth is None or is_uncounted:
        return None
    times = [*_seconds(_profiles(facts, precision, half_parameters), device, precision, samples)]
    forward, backward = (sum(phase) for phase in zip(*times, strict=True))
    both = forward + backward
    blocks = sum(sum(each) for each, unit in zip(times, facts.units, strict=False) if unit.is_block)
    works = (work for profile in _profiles(facts, precision, False) for work in profile.work)
    launching = HOST * sum(work.calls for work in works if work.kind != "recurrent")  # cuDNN launches those itself
    longer = max(1.0, launching / both) if both else 1.0
    itemsize = 2 if half_parameters and precision in ("fp16", "bf16") else facts.itemsize
    handed_on = sum(unit.output for unit in facts.blocks) * itemsize
    bandwidth = device.moved * device.bandwidth
    return Rates(
        ranks=1,
        both=(longer * both, 0.0),
        forward=(longer * forward, 0.0),
        ends=(longer * (both - blocks), 0.0),
        alike=(0.0, min(ALIKE_BYTES * handed_on / bandwidth, longer * blocks / samples)),
        optimizer=OPTIMIZER_BYTES / bandwidth,
        copy=2 / bandwidth,
        launching=launching,
        spread=(1 - 1 / SPREAD, SPREAD - 1),
        assumed=(
            f"the fraction of {device.name}'s data-sheet speed that is reached (times within a factor of {SPREAD:g})",
            f"a host that launches an operator in {HOST * 1e6:g} us, ahead of the GPU (compile=True needs fewer)",
            *device.assumed,
        ),
    )


def assumed_link(device: Device, ranks: int) -> Link | None:
    """The link between devices of one box, from its data sheet; None without one."""
    if device.link is None:
        return None
    bandwidth = device.link * device.link_share
    lines = {kind: CollectiveTime(LATENCY, wire(kind, max(2, ranks)) / bandwidth, 0.5) for kind in KINDS}
    return Link("nccl", max(2, ranks), lines)


def alone(script: Script) -> Script:
    """The script's model, data and loss on one rank, without strategy or extras."""
    return under(script, simplest(1).name)


def _key(script: Script, ranks: int, parameters: Parameters, samples: tuple[int, int]) -> str:
    machine = hardware()
    settings = " ".join(f"{name}={value}" for name, value in sorted(_carried_over(parameters).items()))
    return f"{machine_key(machine, ranks, 'alone')}, {machine.cores} cores, {alone(script).sha256} {settings} {samples}"


def _carried_over(parameters: Parameters) -> dict[str, Value]:
    """The parameters that affect speed; the default precision is left out, so that it is the same as none."""
    options = {name: value for name, value in parameters.items() if name in CARRIED_OVER}
    return {name: value for name, value in options.items() if (name, value) != ("precision", "fp32")}


def _rates(result: dict[str, Any], ranks: int, samples: tuple[int, int], cores: int | None) -> Rates:
    times, overheads = result["times"], result["overheads"]

    def line(what: str) -> tuple[float, float]:
        """(constant, per sample) through two points, both at least 0."""
        if f"{what}_small" not in times:
            return 0.0, 0.0
        small, large = (times[f"{what}_{size}"][0] for size in ("small", "large"))
        slope = max(0.0, (large - small) / (samples[1] - samples[0]))
        constant = small - slope * samples[0]
        return (constant, slope) if constant > 0 else (0.0, large / samples[1])

    both, ends, split = line("both"), line("ends"), line("split")
    blocks = [whole - end for whole, end in zip(both, ends, strict=True)]
    alike = (blocks[0], 0.0)  # host work, if split layers were not measured
    if "split_small" in times:  # a + b = blocks, a + b / ranks = time of split layers
        shares = zip(split, ends, blocks, strict=True)
        constant, slope = (min(max(0.0, ((s - e) * ranks - b) / (ranks - 1)), max(0.0, b)) for s, e, b in shares)
        alike = constant, slope
    if cores is None:  # the host works ahead of a GPU, so its work is hidden
        overheads = overheads | {"dtensor": overheads["tensor"], "split_pair": 0.0}
    usual, least, most = times["both_large"]
    elements = times["optimizer"][0] - overheads["tensor"] * result["tensors"]
    return Rates(
        ranks=ranks,
        both=both,
        forward=line("forward"),
        ends=ends,
        alike=alike,
        optimizer=max(0.0, elements) / result["elements"],
        copy=times["copy"][0] / result["copied"],
        tensor=overheads["tensor"],
        dtensor=overheads["dtensor"],
        split_pair=overheads["split_pair"],
        contention=usual / times["alone"][0],
        waiting=result["waiting"],
        cores=cores,
        spread=(1 - least / usual, most / usual - 1),
    )
