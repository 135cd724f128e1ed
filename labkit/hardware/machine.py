"""Finds out what this machine has, without opening a CUDA context, which would take memory that the ranks need.

The architectures of torch's wheels: "PyTorch CUDA Support Matrix" in pytorch's RELEASE.md, pytorch issues #157517,
#172352 and #190385 (which proposes to end CUDA 12.6 with torch 2.15), pull requests #164471, #175253 and #182849. Their
drivers: NVIDIA's "CUDA Compatibility": one of a CUDA major version runs all of its minor versions.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypedDict

import psutil

from labkit.errors import LaunchError
from labkit.hardware.container import memory_left
from labkit.install import pip_install

# Any of them is a driver; gVisor (Modal, Cloud Run, GKE's sandbox) has only the second, WSL2 only the third.
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
DEVICES = Path("/dev")  # the NVIDIA GPUs of this machine or container are nvidia0, nvidia1, … there
WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")  # in WSL2, that of NVIDIA's driver for Windows
SHOWS_SOME = re.compile(r"\s*(\d|GPU-|MIG-)")  # CUDA ignores CUDA_VISIBLE_DEVICES from the first other word on
# From a cold or remote disk, importing torch has taken minutes: it reads 4 GB of CUDA's libraries.
LISTING_SECONDS, SLOW_SECONDS = 300.0, 10.0
# Run in a process of its own: reading the properties opens a context, which would hold memory on GPU 0.
LIST_GPUS = """
import json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
problem = ""
if torch.version.cuda is None:
    problem = f"torch {torch.__version__} is built without CUDA"
elif not gpus:
    try:
        torch.cuda.init()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps({"gpus": [[p.name, p.total_memory, [p.major, p.minor]] for p in gpus],
                  "uuids": [str(getattr(p, "uuid", "")) for p in gpus], "problem": problem,
                  "cuda": torch.version.cuda, "kernels": torch.cuda.get_arch_list()}))
"""
WHEELS_INDEX = "https://download.pytorch.org/whl/"
KERNEL = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
# The first compute capabilities with fp8 (torch._scaled_mm) and with symmetric memory (torch's own tests of it require
# this, and that each GPU can read every other's memory: requires_cuda_p2p_access in torch/testing).
FP8, SYMMETRIC_MEMORY = (8, 9), (8, 0)
ASKED_AGAIN = "The next call asks again."  # in the message of a GpusUnknownError, between the reason and what to do
Platform = Literal["kaggle", "colab", "wsl2", "linux", "macos", "windows"]


class GpusUnknownError(LaunchError):
    """An NVIDIA driver is installed, but torch could not list the GPUs: there may be some, or none."""


@dataclass(frozen=True)
class Gpu:
    """`memory` is in bytes; `capability` is CUDA's, (7, 5) for a T4."""

    name: str
    memory: int
    capability: tuple[int, int]

    @property
    def sm(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def has_bf16(self) -> bool:
        """Whether it has bf16 in hardware. torch's `is_bf16_supported()` also counts emulation, which is slower than
        fp32."""
        return self.capability >= (8, 0)


@dataclass(frozen=True)
class Hardware:
    """`cores` this process may use; `memory` of the machine, `memory_available` to this process and its container, and
    `shared_memory` (`/dev/shm`, None if it does not exist) in bytes. `gpu_problem` says why it is unknown which `gpus`
    there are, `unusable_gpus` why torch does not see those that are here; both are empty otherwise."""

    platform: Platform
    gpus: tuple[Gpu, ...]
    cores: int
    memory: int
    memory_available: int
    shared_memory: int | None
    visible_devices: str | None
    gpu_problem: str = ""
    unusable_gpus: str = ""

    def has_gpus(self) -> bool:
        """Raises GpusUnknownError if that is unknown."""
        if self.gpu_problem:
            raise GpusUnknownError(self.gpu_problem)
        return bool(self.gpus)

    @property
    def backend(self) -> str:
        return "nccl" if self.has_gpus() else "gloo"

    @property
    def precision(self) -> str:
        """The fastest precision that works here: fp16 needs a gradient scaler, which the scripts have."""
        if not self.has_gpus():
            return "fp32"
        return "bf16" if all(gpu.has_bf16 for gpu in self.gpus) else "fp16"

    def gpu_names(self, ranks: int) -> list[str]:
        """The GPUs that this many ranks will use, as `CUDA_VISIBLE_DEVICES` names them."""
        named = self.visible_devices.split(",") if self.visible_devices else map(str, range(len(self.gpus)))
        return [name.strip() for name in named][: min(ranks, len(self.gpus))]

    @property
    def default_ranks(self) -> int:
        """One per GPU; on the CPU two, enough to show ranks at work."""
        return len(self.gpus) if self.has_gpus() else min(2, self.cores)


def hardware(visible_devices: str | None = None, *, may_be_unknown: bool = False) -> Hardware:
    """This machine now, or as ranks with `CUDA_VISIBLE_DEVICES=visible_devices` will see it.

    Imports torch, in a separate process, only if an NVIDIA driver is installed. If torch cannot list the GPUs there, it
    raises GpusUnknownError, or returns a Hardware with a `gpu_problem` if `may_be_unknown`.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible_devices is None else visible_devices
    memory, allowed = psutil.virtual_memory(), memory_left()
    try:
        gpus, problem = _gpus(visible), ""
    except GpusUnknownError as error:
        if not may_be_unknown:
            raise
        gpus, problem = (), str(error)
    shm = Path("/dev/shm")
    return Hardware(
        platform=platform_name(),
        gpus=gpus,
        gpu_problem=problem,
        unusable_gpus="" if gpus or problem else _unusable_gpus(visible),
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
    report = torch_report(visible)
    gpus = report["gpus"] if report else ()
    return tuple(Gpu(name, memory, (major, minor)) for name, memory, (major, minor) in gpus)


def _unusable_gpus(visible: str | None) -> str:
    """Why torch sees none of the GPUs that are here and not hidden; empty if there are none."""
    devices = sorted(DEVICES.glob("nvidia[0-9]*"))
    if not (devices or WSL_DRIVER.exists()) or (report := torch_report(visible)) is None:
        return ""
    refused = [str(device) for device in devices if not os.access(device, os.R_OK | os.W_OK)]
    if refused and report["cuda"]:
        return f"this user may not read and write {', '.join(refused)}"
    return str(report["problem"]) or "torch gives no reason"


def may_have_gpus(visible: str | None) -> bool:
    """Whether an NVIDIA driver is installed and `CUDA_VISIBLE_DEVICES` does not hide all of its GPUs."""
    return has_driver() and (visible is None or SHOWS_SOME.match(visible) is not None)


def has_driver() -> bool:
    return any(file.exists() for file in DRIVER_FILES)


class TorchReport(TypedDict):
    """What torch reports about the visible GPUs (name, memory and compute capability, and their `uuids` in the same
    order; if there are none, `problem` may say why) and about its own build: its CUDA version (None for a CPU build)
    and `kernels` ("sm_75", …)."""

    gpus: list[tuple[str, int, tuple[int, int]]]
    uuids: list[str]
    problem: str
    cuda: str | None
    kernels: list[str]


def torch_report(visible: str | None) -> TorchReport | None:
    """What torch reports about the visible GPUs. None if there is no driver, or it shows no GPU.

    Raises GpusUnknownError if torch cannot be asked. Then the next call asks again; an answer is remembered.
    """
    return _listing(visible) if may_have_gpus(visible) else None


@cache  # which does not remember exceptions
def _listing(visible: str | None) -> TorchReport:
    env = os.environ | {"PYTHONSAFEPATH": "1"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    message = "importing torch to list the GPUs; from a cold disk this may take minutes"
    waiting = threading.Timer(SLOW_SECONDS, lambda: print(message, file=sys.stderr, flush=True))
    waiting.start()
    try:
        command = [sys.executable, "-c", LIST_GPUS]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LISTING_SECONDS, env=env, check=False)
        if done.returncode:
            last = [f"exit code {done.returncode}", *done.stderr.strip().splitlines()][-1]
            raise _unknown(last)
        report: TorchReport = json.loads(done.stdout.splitlines()[-1])  # torch may have printed something, too
        return report
    except subprocess.TimeoutExpired:
        raise _unknown(f"importing it and asking took more than {LISTING_SECONDS:g} s") from None
    except (OSError, ValueError, LookupError) as error:
        raise _unknown(repr(error)) from None
    finally:
        waiting.cancel()


def _unknown(reason: str) -> GpusUnknownError:
    return GpusUnknownError(
        f"an NVIDIA driver is installed, but torch could not list the GPUs: {reason}. {ASKED_AGAIN} "
        "Run `python -c 'import torch; torch.cuda.init()'` to see why, or set CUDA_VISIBLE_DEVICES='' (for one launch: "
        "env={'CUDA_VISIBLE_DEVICES': ''}) to use the CPU"
    )


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


@dataclass(frozen=True)
class _Wheels:
    """torch's wheels of one CUDA version for Linux (x86): on which architectures they run, and the first torch that no
    longer has them."""

    cuda: tuple[int, int]
    lowest: tuple[int, int]
    highest: tuple[int, int] | None
    ends_with: str | None

    def run_on(self, gpu: Gpu) -> bool:
        return self.lowest <= gpu.capability and (self.highest is None or gpu.capability[0] <= self.highest[0])


# The newest first; CUDA 13's have PTX for architectures that do not exist yet.
WHEELS = (
    _Wheels((13, 0), (7, 5), None, None),
    _Wheels((12, 8), (7, 5), (12, 0), "2.12"),
    _Wheels((12, 6), (5, 0), (9, 0), "2.15"),
)


def install_for(gpus: Sequence[Gpu], driver_cuda: str | None) -> str:
    """The pip command for the newest torch that has kernels for these GPUs and runs under a driver that supports CUDA
    up to `driver_cuda`, such as "12.4" (None: unknown); empty if there is none."""
    major = int(driver_cuda.split(".")[0]) if driver_cuda else WHEELS[0].cuda[0]
    for wheels in WHEELS:
        if wheels.cuda[0] <= major and gpus and all(wheels.run_on(gpu) for gpu in gpus):
            torch = f"torch<{wheels.ends_with}" if wheels.ends_with else "torch"
            return f"{pip_install(torch)} --index-url {WHEELS_INDEX}cu{wheels.cuda[0]}{wheels.cuda[1]}"
    return ""
