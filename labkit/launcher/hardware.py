"""What this machine has, without opening a CUDA context, which would take memory that the ranks need."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import psutil

from labkit.record.container import memory_left

__all__ = [
    "DRIVER_FILES",
    "FP8",
    "SYMMETRIC_MEMORY",
    "Gpu",
    "Hardware",
    "Platform",
    "driver_version",
    "has_kernels",
    "hardware",
    "may_have_gpus",
    "platform_name",
    "torch_report",
    "without_kernels",
]

DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))  # the second is WSL2's
KERNEL = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
# The first compute capabilities with fp8 (torch._scaled_mm) and with symmetric memory (torch's own tests of it require
# this, and that each GPU can read every other's memory: requires_cuda_p2p_access in torch/testing).
FP8, SYMMETRIC_MEMORY = (8, 9), (8, 0)
Platform = Literal["kaggle", "colab", "wsl2", "linux", "macos", "windows"]


@dataclass(frozen=True)
class Gpu:
    """`memory` in bytes; `capability` is CUDA's, (7, 5) for a T4."""

    name: str
    memory: int
    capability: tuple[int, int]

    @property
    def sm(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def has_bf16(self) -> bool:
        """bf16 in hardware. torch's `is_bf16_supported()` also counts emulation, which is slower than fp32."""
        return self.capability >= (8, 0)


@dataclass(frozen=True)
class Hardware:
    """`cores` this process may use; `memory` of the machine, `memory_available` to this process and its container, and
    `shared_memory` (`/dev/shm`, None if it does not exist) in bytes."""

    platform: Platform
    gpus: tuple[Gpu, ...]
    cores: int
    memory: int
    memory_available: int
    shared_memory: int | None
    visible_devices: str | None
    gpu_problem: str = ""

    @property
    def backend(self) -> str:
        return "nccl" if self.gpus else "gloo"

    @property
    def precision(self) -> str:
        """The fastest precision that works here: fp16 needs a gradient scaler, which the scripts have."""
        if not self.gpus:
            return "fp32"
        return "bf16" if all(gpu.has_bf16 for gpu in self.gpus) else "fp16"

    @property
    def default_ranks(self) -> int:
        """One per GPU; on the CPU two, enough to show ranks at work."""
        return len(self.gpus) or min(2, self.cores)


def hardware(visible_devices: str | None = None) -> Hardware:
    """This machine now, or as ranks with `CUDA_VISIBLE_DEVICES=visible_devices` will see it.

    Imports torch, in a separate process, only if an NVIDIA driver is installed.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible_devices is None else visible_devices
    memory, allowed = psutil.virtual_memory(), memory_left()
    try:
        gpus, problem = _gpus(visible), ""
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        gpus, problem = (), f"an NVIDIA driver is installed, but torch could not list the GPUs: {error}"
    shm = Path("/dev/shm")
    return Hardware(
        platform=platform_name(),
        gpus=gpus,
        gpu_problem=problem,
        cores=usable_cores(),
        memory=memory.total,
        memory_available=memory.available if allowed is None else min(memory.available, allowed),
        shared_memory=shutil.disk_usage(shm).total if shm.exists() else None,
        visible_devices=visible,
    )


def platform_name() -> Platform:
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        return "kaggle"
    if "COLAB_RELEASE_TAG" in os.environ:
        return "colab"
    system = platform.system()
    if system == "Linux":
        return "wsl2" if "microsoft" in platform.release().lower() else "linux"
    return "macos" if system == "Darwin" else "windows"


def driver_version() -> str:
    """The NVIDIA driver's version, without asking the driver; empty without one and in WSL2."""
    try:
        text = DRIVER_FILES[0].read_text()
    except OSError:
        return ""
    return match[0] if (match := re.search(r"\d+\.\d+(\.\d+)?", text)) else ""


def usable_cores() -> int:
    """Cores this process may run on: affinity, and a container's CPU quota (cgroup v2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def _gpus(visible: str | None) -> tuple[Gpu, ...]:
    report = torch_report(visible) or {"gpus": ()}
    return tuple(Gpu(name, memory, (major, minor)) for name, memory, (major, minor) in report["gpus"])


def may_have_gpus(visible: str | None) -> bool:
    """Whether an NVIDIA driver is installed and `CUDA_VISIBLE_DEVICES` hides not all of its GPUs."""
    return visible != "" and any(file.exists() for file in DRIVER_FILES)


@cache
def torch_report(visible: str | None) -> dict[str, Any] | None:
    """What torch reports about the visible GPUs (`gpus`, and their `uuids` in the same order) and about its own build:
    its CUDA version (`cuda`, None for a CPU build) and `kernels` ("sm_75", …). None if no driver is installed."""
    if not may_have_gpus(visible):
        return None
    # In a separate process: reading the properties opens a context that would hold memory on GPU 0.
    code = (
        "import json, torch\n"
        "gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]\n"
        "print(json.dumps({'gpus': [[p.name, p.total_memory, [p.major, p.minor]] for p in gpus],\n"
        "                  'uuids': [str(getattr(p, 'uuid', '')) for p in gpus],\n"
        "                  'cuda': torch.version.cuda, 'kernels': torch.cuda.get_arch_list()}))"
    )
    env = os.environ | {"PYTHONSAFEPATH": "1"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True, env=env)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def without_kernels(gpus: Sequence[Gpu], built: Sequence[str]) -> list[Gpu]:
    """The GPUs on which a torch with these kernels cannot compute; none if the build has no CUDA kernels."""
    if not any(KERNEL.fullmatch(name) for name in built):
        return []
    return [gpu for gpu in gpus if not has_kernels(gpu.capability, built)]


def has_kernels(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Whether any of these kernels runs on a GPU: a binary (sm_) on the same major version from its minor version on,
    PTX (compute_) on all newer GPUs, the suffix "a" on exactly that GPU, "f" on its family."""
    for name in built:
        if not (match := KERNEL.fullmatch(name)):
            continue
        kind, major, minor, suffix = match[1], int(match[2]), int(match[3]), match[4]
        if suffix == "a":
            runs = capability == (major, minor)
        elif kind == "compute" and not suffix:
            runs = capability >= (major, minor)
        else:
            runs = capability[0] == major and capability[1] >= minor
        if runs:
            return True
    return False
