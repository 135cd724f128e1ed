"""Devices that can be planned for, with memory and peak rates from the manufacturers' data sheets.

The figures are upper bounds; the fraction that training reaches is measured (rates) or assumed (speed). Each row names
its data sheet. FLOP/s are dense (without sparsity) and with fp32 accumulation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from labkit.errors import LaunchError
from labkit.hardware import FP8, SYMMETRIC_MEMORY, Hardware, hardware

__all__ = ["DEVICES", "THIS_MACHINE", "Device", "device_named", "devices_named", "this_machine"]

GIB = 1 << 30
THIS_MACHINE = "this machine"
# GPU memory of a process beside its tensors: CUDA's context, 0.1-0.5 GiB (out-of-memory messages of T4s show 0.11-0.16;
# an A100 with torch 2.1 0.47, Bekman, "Machine Learning Engineering"), NCCL's buffers (4 MiB for each channel and peer:
# NCCL_BUFFSIZE in its documentation) and cuBLAS's workspaces. Assumed.
OUTSIDE_TENSORS = GIB // 2
# What torch allocates for cuBLAS, once for the thread of forward and once for that of backward: 2 x 4,096 + 8 x 16 KiB,
# since Hopper 32 MiB (parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp). It is among the allocator's
# bytes, not among a plan's.
CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_OF_HOPPER = 8320 << 10, 32 << 20
# Host memory of a process that has loaded Python and torch: measured with torch 2.13 on Linux (`resident` in the first
# records of every run), assumed for other versions.
OUTSIDE_TENSORS_ON_CPU = 222 << 20


@dataclass(frozen=True)
class Device:
    """`memory` and `usable` (for tensors) in bytes; `flops` in FLOP/s by supported precision; `bandwidth` of memory,
    `link` from one device to the others in its box and `network` from a whole box to others, in bytes/s one way.
    `box` is the number of devices per box; `nodes` the number of boxes in the plan. `shared`: the ranks divide
    `usable` among themselves. `outside`: bytes that a process uses before its first tensor. `reached`: the fraction of
    `flops` that large matrix products reach, `moved` the fraction of `bandwidth` that other operators reach.
    `capability` is torch's; a CPU has (0, 0)."""

    name: str
    memory: int
    usable: int
    flops: Mapping[str, float]
    bandwidth: float | None
    link: float | None
    link_name: str
    box: int
    network: float
    source: str
    aliases: tuple[str, ...] = field(default=(), repr=False)
    shared: bool = False
    nodes: int = 1
    outside: int = OUTSIDE_TENSORS
    halves: tuple[str, ...] = ("fp32", "bf16")  # precisions of a device without figures in `flops`
    reached: float = 1.0
    moved: float = 1.0
    capability: tuple[int, int] = (0, 0)

    @property
    def is_this_machine(self) -> bool:
        """Whether this is a device of this machine, not a preset."""
        return self.name.startswith(THIS_MACHINE)

    def usable_by(self, ranks: int) -> int:
        """Bytes for the tensors of each rank if `ranks` ranks use such devices."""
        return max(0, self.usable // -(-ranks // self.nodes) - self.outside) if self.shared else self.usable

    def times(self, ranks: int) -> str:
        """`8 x A100 80`, or `2 ranks of this machine` if they share it."""
        return f"{ranks:,} rank{'s' if ranks > 1 else ''} of {self.name}" if self.shared else f"{ranks:,} x {self.name}"

    @property
    def dispatches_as(self) -> tuple[int, int] | None:
        """The compute capability whose kernels torch chooses: newer GPUs have those of 8.0. None for a CPU."""
        return None if self.shared else min(self.capability, (8, 0))

    @property
    def cublas_workspaces(self) -> int:
        """Bytes of `outside` that torch's allocator holds for cuBLAS, for the threads of forward and of backward; of
        an AMD GPU for hipBLAS, assumed."""
        return 2 * (CUBLAS_WORKSPACE_OF_HOPPER if self.capability >= (9, 0) else CUBLAS_WORKSPACE)

    @property
    def has_fp8(self) -> bool:
        """Whether its tensor cores multiply in 8 bits: Ada, Hopper, Blackwell and CDNA 3."""
        return self.capability >= FP8

    @property
    def has_symmetric_memory(self) -> bool:
        """Whether torch's symmetric memory spans the devices of a box."""
        return self.capability >= SYMMETRIC_MEMORY and self.link_name.startswith("NVLink")

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions that the hardware supports; for a CPU, those that the scripts accept there."""
        return tuple(self.flops) or self.halves


def _gpu(
    name: str,
    visible: float,
    fp32: float,
    fp16: float,
    bf16: float | None,
    bandwidth: float,
    link_name: str,
    box: int,
    network: float,
    source: str,
    *aliases: str,
) -> Device:
    """`visible` in GiB, as torch reports it; the others in TFLOP/s and GB/s."""
    flops = {"fp32": fp32 * 1e12, "fp16": fp16 * 1e12} | ({"bf16": bf16 * 1e12} if bf16 else {})
    memory = int(visible * GIB)
    return Device(
        name,
        memory,
        memory - OUTSIDE_TENSORS,
        flops,
        bandwidth * 1e9,
        LINKS[link_name] * 1e9,
        link_name,
        box,
        network * 1e9,
        source,
        aliases,
        reached=next((share for start, share in REACHED.items() if name.startswith(start)), REACHED_ELSEWHERE),
        moved=MOVED_HBM if name.startswith(HBM) else MOVED_GDDR,
        capability=next(value for start, value in CAPABILITIES.items() if name.startswith(start)),
    )


# By the beginning of the name: developer.nvidia.com/cuda-gpus; AMD's as torch reports it (gfx942).
CAPABILITIES = {
    "P100": (6, 0),
    "V100": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "A10": (8, 6),
    "RTX 30": (8, 6),
    "L4": (8, 9),
    "RTX 40": (8, 9),
    "H": (9, 0),
    "MI300X": (9, 4),
    "B200": (10, 0),
    "RTX 50": (12, 0),
}
# By the beginning of the name. Measured in bf16 for A100 to MI300X: Bekman, "Machine Learning Engineering",
# compute/accelerator, "Maximum Achievable Matmul FLOPS". A T4 throttles at 70 W; GeForce cards multiply with fp32 sums
# at half of their tensor cores' rate and reach nearly all of it: both assumed.
REACHED = {
    "A100 PCIe": 0.81,
    "A100": 0.87,
    "H100": 0.80,
    "H200": 0.80,
    "B200": 0.78,
    "MI300X": 0.51,
    "T4": 0.5,
    "RTX": 0.95,
}
REACHED_ELSEWHERE = 0.8
# Fitted to published throughputs: docs/evidence/published_speed.md. Operators are rarely long enough for HBM's full
# bandwidth.
HBM, MOVED_HBM, MOVED_GDDR = ("P100", "V100", "A100", "H100", "H200", "B200", "MI300X"), 0.6, 0.8
# GB/s one way. PCIe: PCI-SIG, 8, 16 and 32 GT/s on 16 lanes less 128b/130b coding. NVLink: half of the total bandwidth
# in NVIDIA's data sheets (300, 600, 900 and 1,800 GB/s). Infinity Fabric: half of the MI300X's 7 x 128 GB/s.
LINKS = {
    "PCIe 3 x16": 15.75,
    "PCIe 4 x16": 31.5,
    "PCIe 5 x16": 63.0,
    "NVLink 2": 150.0,
    "NVLink 3": 300.0,
    "NVLink 4": 450.0,
    "NVLink 5": 900.0,
    "Infinity Fabric": 448.0,
}
# GB/s per box: DGX-1 4 x 100 Gbit/s, DGX A100 8 x 200, DGX H100 8 x 400 (their user guides); the others are assumed:
# 100 Gbit/s for boxes of eight, 25 for smaller ones in a cloud or at home.
GBIT_100, GBIT_25 = 12.5, 3.125
# Memory is what torch reports, less than the nominal size; from out-of-memory messages in public issues.
DEVICES: tuple[Device, ...] = (
    _gpu(
        "T4",
        14.74,
        8.1,
        65,
        None,
        320,
        "PCIe 3 x16",
        2,
        GBIT_25,
        "NVIDIA T4 data sheet; memory from messages on Kaggle and Colab",
    ),
    _gpu(
        "P100",
        15.89,
        9.3,
        18.7,
        None,
        732,
        "PCIe 3 x16",
        1,
        GBIT_25,
        "NVIDIA Tesla P100 PCIe 16 GB data sheet",
        "p10016",
        "p100pcie16",
    ),
    _gpu("L4", 22.16, 30.3, 121, 121, 300, "PCIe 4 x16", 8, GBIT_100, "NVIDIA L4 data sheet"),
    _gpu("L40S", 44.4, 91.6, 362, 362, 864, "PCIe 4 x16", 8, GBIT_100, "NVIDIA L40S data sheet", "l40s48"),
    _gpu("A10", 22.06, 31.2, 125, 125, 600, "PCIe 4 x16", 8, GBIT_100, "NVIDIA A10 data sheet"),
    _gpu("A10G", 22.06, 35, 70, 70, 600, "PCIe 4 x16", 8, GBIT_100, "NVIDIA A10G data sheet (Amazon's g5)", "a10g24"),
    _gpu("V100 16", 15.77, 15.7, 125, None, 900, "NVLink 2", 8, 50, "NVIDIA V100 SXM2 data sheet"),
    _gpu("V100 32", 31.73, 15.7, 125, None, 900, "NVLink 2", 8, 50, "NVIDIA V100 SXM2 data sheet"),
    _gpu(
        "V100 PCIe 16",
        15.77,
        14,
        112,
        None,
        900,
        "PCIe 3 x16",
        8,
        GBIT_100,
        "NVIDIA V100 PCIe data sheet",
        "v10016pcie",
    ),
    _gpu(
        "V100 PCIe 32",
        31.73,
        14,
        112,
        None,
        900,
        "PCIe 3 x16",
        8,
        GBIT_100,
        "NVIDIA V100 PCIe data sheet",
        "v10032pcie",
    ),
    _gpu("A100 40", 39.39, 19.5, 312, 312, 1555, "NVLink 3", 8, 200, "NVIDIA A100 SXM data sheet"),
    _gpu("A100 80", 79.15, 19.5, 312, 312, 2039, "NVLink 3", 8, 200, "NVIDIA A100 SXM data sheet"),
    _gpu(
        "A100 PCIe 40",
        39.39,
        19.5,
        312,
        312,
        1555,
        "PCIe 4 x16",
        8,
        GBIT_100,
        "NVIDIA A100 PCIe data sheet",
        "a10040pcie",
    ),
    _gpu(
        "A100 PCIe 80",
        79.15,
        19.5,
        312,
        312,
        1935,
        "PCIe 4 x16",
        8,
        GBIT_100,
        "NVIDIA A100 PCIe data sheet",
        "a10080pcie",
    ),
    _gpu("H100 PCIe", 79.1, 51, 756, 756, 2000, "PCIe 5 x16", 8, GBIT_100, "NVIDIA H100 PCIe data sheet", "h100pcie80"),
    _gpu(
        "H100",
        79.1,
        67,
        989,
        989,
        3350,
        "NVLink 4",
        8,
        400,
        "NVIDIA H100 SXM data sheet (1,979 TFLOP/s in it is with sparsity)",
        "h10080",
    ),
    _gpu(
        "H200",
        139.7,
        67,
        989,
        989,
        4800,
        "NVLink 4",
        8,
        400,
        "NVIDIA H200 SXM data sheet (1,979 TFLOP/s in it is with sparsity)",
        "h200141",
    ),
    _gpu(
        "B200",
        178,
        80,
        2250,
        2250,
        8000,
        "NVLink 5",
        8,
        400,
        "NVIDIA HGX B200 data sheet (4,500 TFLOP/s in it is with sparsity); memory assumed, of 180 GB",
        "b200180",
    ),
    _gpu(
        "MI300X",
        191,
        163.4,
        1307,
        1307,
        5300,
        "Infinity Fabric",
        8,
        400,
        "AMD Instinct MI300X data sheet; memory assumed, of 192 GB",
        "mi300x192",
    ),
    _gpu(
        "RTX 5090",
        31.36,
        104.8,
        209.5,
        209.5,
        1792,
        "PCIe 5 x16",
        2,
        GBIT_25,
        "NVIDIA RTX Blackwell white paper (FP16 Tensor with FP32 accumulate)",
        "5090",
        "rtx509032",
    ),
    _gpu(
        "RTX 3090",
        23.69,
        35.6,
        71,
        71,
        936,
        "PCIe 4 x16",
        2,
        GBIT_25,
        "NVIDIA GA102 white paper (FP16 Tensor with FP32 accumulate)",
        "3090",
        "rtx309024",
    ),
    _gpu(
        "RTX 4090",
        23.64,
        82.6,
        165.2,
        165.2,
        1008,
        "PCIe 4 x16",
        2,
        GBIT_25,
        "NVIDIA Ada white paper (FP16 Tensor with FP32 accumulate)",
        "4090",
        "rtx409024",
    ),
)


# What notebook services lend: kaggle.com/docs/notebooks, colab.research.google.com (2026)
LENT = {
    "kaggle": "2xT4",
    "kaggle p100": "1xP100",
    "colab": "1xT4",
    "colab l4": "1xL4",
    "colab a100": "1xA100 40",
}


def device_named(name: str | None) -> Device:
    """A preset by its name in any spelling ("a100-40", "Tesla T4", "A100 40GB"); None or "this machine" is this
    machine's device. Raises LaunchError, which lists all presets, for an unknown or ambiguous name."""
    if name is None or _plain(name) in ("thismachine", "this", "here", ""):
        return this_machine(hardware())
    if preset := _preset(name):
        return preset
    known = {_plain(name): name for name in (*(d.name for d in DEVICES), *(service.title() for service in LENT))}
    kind = re.sub(r"^\d+x", "", _plain(name))
    matches = [d.name for d in DEVICES if d.name.lower().startswith(f"{kind} ")]
    near = get_close_matches(kind, known, n=1, cutoff=0.0)[0]
    hint = f"use {' or '.join(matches)}" if matches else f"the closest name is {known[near]}"
    raise LaunchError(f"unknown device {name!r}; {hint}. Known devices: {', '.join([*known.values(), THIS_MACHINE])}")


def devices_named(text: str | None) -> tuple[int | None, Device]:
    """`(count, device)` of "2xT4", "T4x2", "8 x H100" or "Kaggle"; the count is None if the text has none."""
    if not isinstance(text, str | None):
        raise LaunchError(f"device must be a name such as 'T4', '2xT4' or 'A100 80', got {text!r}")
    text = LENT.get((text or "").strip().lower(), text)
    for pattern, count, name in ((r"(\d+)(?:\s*[x×*]\s*|\s)(.+)", 1, 2), (r"(.+?)\s*[x×*]\s*(\d+)", 2, 1)):
        match = re.fullmatch(pattern, (text or "").strip(), re.IGNORECASE)
        if match and _preset(match[name]) and int(match[count]):
            return int(match[count]), device_named(match[name])
    return None, device_named(text)


def this_machine(here: Hardware) -> Device:
    """The devices of this machine. A GPU has the speed of the preset with its name, if there is one."""
    if not here.gpus:
        return Device(
            THIS_MACHINE,
            here.memory,
            here.memory_available,
            {},
            None,
            None,
            "shared memory of the CPU",
            max(1, here.cores),
            GBIT_25 * 1e9,
            "reported by the operating system",
            shared=True,
            outside=OUTSIDE_TENSORS_ON_CPU,
        )
    gpu = min(here.gpus, key=lambda each: each.memory)
    like = _preset(gpu.name)
    return Device(
        f"{THIS_MACHINE}'s {gpu.name}",
        gpu.memory,
        gpu.memory - OUTSIDE_TENSORS,
        like.flops if like else {},
        like.bandwidth if like else None,
        like.link if like else None,
        like.link_name if like else "unknown",
        len(here.gpus),
        like.network if like else GBIT_25 * 1e9,
        f"memory reported by the driver; {like.source}" if like else "memory reported by the driver",
        halves=("fp32", "fp16", *(["bf16"] if gpu.has_bf16 else [])),
        reached=like.reached if like else REACHED_ELSEWHERE,
        moved=like.moved if like else MOVED_GDDR,
        capability=min(each.capability for each in here.gpus),
    )


def _preset(name: str) -> Device | None:
    plain = _plain(name)
    return next((d for d in DEVICES if plain in (_plain(d.name), *d.aliases)), None)


def _plain(name: str) -> str:
    """Lower case, without brand words, units and punctuation: "NVIDIA A100-SXM4-40GB" is "a10040"."""
    words = re.sub(r"nvidia|tesla|geforce|quadro|amd|instinct|sxm\d?|hbm\d?e?|(?<=\d)\s*gi?b\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]", "", words)
