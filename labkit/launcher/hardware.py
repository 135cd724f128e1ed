"""What this machine has, without opening a CUDA context: the ranks will want that memory."""

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
    "Gpu",
    "Hardware",
    "Platform",
    "asked_of_torch",
    "has_kernels",
    "hardware",
    "platform_name",
    "without_kernels",
]

DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))  # one is there with a driver; WSL2's is dxg
KERNEL = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
Platform = Literal["kaggle", "wsl2", "linux", "macos", "windows"]


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
    `shared_memory` (`/dev/shm`) in bytes, None where there is none."""

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
        """The fastest precision that is right here: fp16 needs a gradient scaler, which the scripts have."""
        if not self.gpus:
            return "fp32"
        return "bf16" if all(gpu.has_bf16 for gpu in self.gpus) else "fp16"

    @property
    def default_ranks(self) -> int:
        """One per GPU; on the CPU two, enough to see ranks at work."""
        return len(self.gpus) or min(2, self.cores)


def hardware(visible_devices: str | None = None) -> Hardware:
    """Look at the machine now, or as ranks will see it that are given `CUDA_VISIBLE_DEVICES=visible_devices`.

    Imports torch (in a process of its own) only where an NVIDIA driver is installed.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible_devices is None else visible_devices
    memory, left = psutil.virtual_memory(), memory_left()
    try:
        gpus, problem = _gpus(visible), ""
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        gpus, problem = (), f"an NVIDIA driver is here, but torch could not be asked about its GPUs: {error}"
    shm = Path("/dev/shm")
    return Hardware(
        platform=platform_name(),
        gpus=gpus,
        gpu_problem=problem,
        cores=usable_cores(),
        memory=memory.total,
        memory_available=memory.available if left is None else min(memory.available, left),
        shared_memory=shutil.disk_usage(shm).total if shm.exists() else None,
        visible_devices=visible,
    )


def platform_name() -> Platform:
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        return "kaggle"
    system = platform.system()
    if system == "Linux":
        return "wsl2" if "microsoft" in platform.release().lower() else "linux"
    return "macos" if system == "Darwin" else "windows"


def usable_cores() -> int:
    """Cores this process may run on: affinity, and a container's CPU quota (cgroup v2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def _gpus(visible: str | None) -> tuple[Gpu, ...]:
    said = asked_of_torch(visible) or {"gpus": ()}
    return tuple(Gpu(name, memory, (major, minor)) for name, memory, (major, minor) in said["gpus"])


@cache
def asked_of_torch(visible: str | None) -> dict[str, Any] | None:
    """What torch says of the GPUs it sees (`gpus`, and their `uuids` in the same order) and of itself: the CUDA it is
    built for (`cuda`, None for a build without) and the `kernels` in it ("sm_75", …). None where no driver is."""
    if visible == "" or not any(file.exists() for file in DRIVER_FILES):
        return None
    # Asked in a process of its own: asking for properties opens a context that would hold memory on GPU 0.
    code = (
        "import json, torch\n"
        "found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]\n"
        "print(json.dumps({'gpus': [[p.name, p.total_memory, [p.major, p.minor]] for p in found],\n"
        "                  'uuids': [str(getattr(p, 'uuid', '')) for p in found],\n"
        "                  'cuda': torch.version.cuda, 'kernels': torch.cuda.get_arch_list()}))"
    )
    env = os.environ | {"PYTHONSAFEPATH": "1"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True, env=env)
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def without_kernels(gpus: Sequence[Gpu], built: Sequence[str]) -> list[Gpu]:
    """Those of the GPUs on which a torch with these kernels cannot compute; none where it names no kernels of CUDA."""
    if not any(KERNEL.fullmatch(name) for name in built):
        return []
    return [gpu for gpu in gpus if not has_kernels(gpu.capability, built)]


def has_kernels(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Whether code for one of these runs on a GPU: a binary (sm_) on its own major version from its minor one on,
    PTX (compute_) on all that are newer; with an "a" only on exactly that GPU, with an "f" on its family."""
    for name in built:
        if not (found := KERNEL.fullmatch(name)):
            continue
        kind, major, minor, only = found[1], int(found[2]), int(found[3]), found[4]
        if only == "a":
            runs = capability == (major, minor)
        elif kind == "compute" and not only:
            runs = capability >= (major, minor)
        else:
            runs = capability[0] == major and capability[1] >= minor
        if runs:
            return True
    return False
