"""Finds which of torch's wheels for Linux (x86) run on a GPU under a driver.

Architectures: "PyTorch CUDA Support Matrix" in pytorch's RELEASE.md, pytorch issues #157517, #172352 and #190385 (which
proposes to end CUDA 12.6 with torch 2.15), pull requests #164471, #175253 and #182849. Drivers: NVIDIA's "CUDA
Compatibility": one of a CUDA major version runs all of its minor versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.hardware.machine import Gpu

__all__ = ["install_for"]

INDEX = "https://download.pytorch.org/whl/"


@dataclass(frozen=True)
class _Wheels:
    """The wheels of one CUDA version: on which architectures they run, and the first torch that no longer has them."""

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
            torch = f"'torch<{wheels.ends_with}'" if wheels.ends_with else "torch"
            return f"python -m pip install {torch} --index-url {INDEX}cu{wheels.cuda[0]}{wheels.cuda[1]}"
    return ""
