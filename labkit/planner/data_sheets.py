"""Describes the devices that can be planned for: devices.csv has a row for each, with figures from its data sheet.

`memory_gib` is what torch reports, less than the nominal size; from out-of-memory messages in public issues. The rates
are upper bounds, one way for links; FLOP/s are dense (without sparsity) and with fp32 accumulation, "none" if the
device does not support the precision. `network_gb_s` is that of a box: DGX-1 4 x 100 Gbit/s, DGX A100 8 x 200, DGX
H100 8 x 400 (their user guides). `capability`: developer.nvidia.com/cuda-gpus; AMD's as torch reports it (gfx942).
`reached`, the fraction of the peak that matrix products reach, was measured in bf16 for A100 to MI300X: Bekman,
"Machine Learning Engineering", compute/accelerator, "Maximum Achievable Matmul FLOPS". A T4 throttles at 70 W; GeForce
cards multiply with fp32 sums at half of their tensor cores' rate and reach nearly all of it: both assumed. An empty
field means that the fact is unknown: a plan that uses it says what it assumes instead.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from labkit.errors import LaunchError, did_you_mean
from labkit.hardware import FP8, SYMMETRIC_MEMORY, Hardware, hardware

T = TypeVar("T")
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
# GB/s one way, and the fraction of it that collectives reach. PCIe: PCI-SIG, 8, 16 and 32 GT/s on 16 lanes less
# 128b/130b coding; through the host, 5 of 15.75 GB/s; 1.4 was observed between two T4s. NVLink: half of the total
# bandwidth in NVIDIA's data sheets (300, 600, 900 and 1,800 GB/s); about 230 of 300 GB/s in nccl-tests on 8 A100.
# Infinity Fabric: half of the MI300X's 7 x 128 GB/s. The fractions are assumed.
LINKS = {
    "PCIe 3 x16": (15.75, 0.32),
    "PCIe 4 x16": (31.5, 0.32),
    "PCIe 5 x16": (63.0, 0.32),
    "NVLink 2": (150.0, 0.75),
    "NVLink 3": (300.0, 0.75),
    "NVLink 4": (450.0, 0.75),
    "NVLink 5": (900.0, 0.75),
    "Infinity Fabric": (448.0, 0.75),
}
# Fitted to published throughputs: docs/evidence/published_speed.md. Operators are rarely long enough for HBM's full
# bandwidth.
MOVED = {"HBM": 0.6, "GDDR": 0.8}
# What is assumed where a row says nothing.
REACHED, CAPABILITY = 0.8, (8, 0)
# GB/s (25 and 100 Gbit/s) of small boxes in a cloud or at home, and of boxes of eight
NETWORK, NETWORK_OF_EIGHT = 3.125, 12.5


@dataclass(frozen=True, kw_only=True)
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
    box: int
    source: str
    flops: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float | None = None
    link: float | None = None
    link_name: str = "unknown"
    link_share: float = 1.0
    network: float = NETWORK * 1e9
    aliases: tuple[str, ...] = field(default=(), repr=False)
    shared: bool = False
    nodes: int = 1
    outside: int = OUTSIDE_TENSORS
    halves: tuple[str, ...] = ("fp32", "bf16")  # precisions of a device without figures in `flops`
    reached: float = 1.0
    moved: float = 1.0
    capability: tuple[int, int] = (0, 0)
    assumed: tuple[str, ...] = ()  # what its row in devices.csv does not say

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


def _text(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _tflops(text: str) -> float:
    return 0.0 if text == "none" else float(text)


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def devices_in(table: str) -> tuple[Device, ...]:
    """The devices of a table in CSV with the columns of devices.csv. Raises ValueError for a field that cannot be read,
    with its row and column."""
    return tuple(_device(fields) for fields in csv.DictReader(table.splitlines(), skipinitialspace=True))


def _device(fields: Mapping[str, str | None]) -> Device:
    name, where = str(fields["name"]), f"devices.csv, row {fields['name']!r}"
    if None in fields:
        raise ValueError(f"{where}: it has more fields than columns; quote a text with commas")
    texts = {column: (text or "").strip() for column, text in fields.items()}

    def read(column: str, how: Callable[[str], T], if_empty: T | None = None) -> T:
        text = texts[column]
        if not text and if_empty is not None:
            return if_empty
        try:
            return how(text)
        except (ValueError, KeyError):
            found = repr(text) if text else "nothing"
            raise ValueError(f"{where}, column {column!r}: it has {found}; data_sheets.py says what to write") from None

    memory = int(read("memory_gib", float) * GIB)
    flops = {kind: read(f"{kind}_tflops", _tflops) * 1e12 for kind in ("fp32", "fp16", "bf16")}
    box, (link, link_share) = read("box", int), read("link", LINKS.__getitem__)
    assumed = {
        "capability": f"{name} has compute capability {CAPABILITY[0]}.{CAPABILITY[1]}",
        "reached": f"{name} reaches {REACHED:.0%} of its peak in matrix products",
        "memory_type": f"{name} reaches {MOVED['HBM']:.0%} of its memory's bandwidth in other operators",
    }
    return Device(
        name=name,
        memory=memory,
        usable=memory - OUTSIDE_TENSORS,
        flops={kind: rate for kind, rate in flops.items() if rate},
        bandwidth=read("bandwidth_gb_s", float) * 1e9,
        link=link * 1e9,
        link_name=texts["link"],
        link_share=link_share,
        box=box,
        network=read("network_gb_s", float, NETWORK_OF_EIGHT if box >= 8 else NETWORK) * 1e9,
        source=read("source", _text),
        aliases=tuple(texts["aliases"].split()),
        reached=read("reached", float, REACHED),
        moved=read("memory_type", MOVED.__getitem__, MOVED["HBM"]),
        capability=read("capability", _capability, CAPABILITY),
        assumed=tuple(sentence for column, sentence in assumed.items() if not texts[column]),
    )


DEVICES = devices_in(Path(__file__).with_name("devices.csv").read_text(encoding="utf-8"))
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
    kind = re.sub(r"^\d+x", "", _plain(name))
    if matches := [d.name for d in DEVICES if d.name.lower().startswith(f"{kind} ")]:
        raise LaunchError(f"there are several devices {name!r}; use {' or '.join(matches)}")
    known = [*(d.name for d in DEVICES), *(service.title() for service in LENT), THIS_MACHINE]
    raise LaunchError(f"unknown device {name!r}{did_you_mean(kind, known)}")


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
            name=THIS_MACHINE,
            memory=here.memory,
            usable=here.memory_available,
            box=max(1, here.cores),
            link_name="shared memory of the CPU",
            source="reported by the operating system",
            shared=True,
            outside=OUTSIDE_TENSORS_ON_CPU,
        )
    gpu = min(here.gpus, key=lambda each: each.memory)
    like = _preset(gpu.name) or Device(name="", memory=0, usable=0, box=1, source="")
    return replace(
        like,
        name=f"{THIS_MACHINE}'s {gpu.name}",
        memory=gpu.memory,
        usable=gpu.memory - OUTSIDE_TENSORS,
        box=len(here.gpus),
        source="; ".join(filter(None, ("memory reported by the driver", like.source))),
        aliases=(),
        halves=("fp32", "fp16", *(["bf16"] if gpu.has_bf16 else [])),
        capability=min(each.capability for each in here.gpus),
    )


def _preset(name: str) -> Device | None:
    plain = _plain(name)
    return next((d for d in DEVICES if plain in (_plain(d.name), *d.aliases)), None)


def _plain(name: str) -> str:
    """Lower case, without brand words, units and punctuation: "NVIDIA A100-SXM4-40GB" is "a10040"."""
    words = re.sub(r"nvidia|tesla|geforce|quadro|amd|instinct|sxm\d?|hbm\d?e?|(?<=\d)\s*gi?b\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]", "", words)
