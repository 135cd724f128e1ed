"""The doctor: what this machine has, what to use on it, what will go wrong."""

from __future__ import annotations

import html
import os
import resource
import sys
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from labkit.launcher import bandwidth as _bandwidth
from labkit.launcher import preflight as _preflight
from labkit.launcher.hardware import Hardware, hardware
from labkit.launcher.torchrun import LEFTOVER_PREFIXES, LEFTOVERS
from labkit.view import words
from labkit.view.frontend import is_headless, ui

__all__ = ["Machine", "doctor"]

PACKAGES = ("torch", "ipykernel", "ipywidgets", "IPython")
SMALL_SHM = 1 << 30
FEW_FILES = 1024
FRONT_ENDS = {
    "svg": "a notebook with live widgets",
    "display": "a notebook without widgets: redrawn output",
    "static": "headless (papermill, nbclient): static figures, launch waits for the end",
    "text": "a terminal",
}


def doctor(*, preflight: bool = False, bandwidth: bool | int = False) -> Machine:
    """Look at this machine. The result shows itself as a table and says what to use here.

    With `preflight=True` as many ranks as `nproc_per_node="auto"` would start meet and sum a number, which takes some
    five seconds; with GPUs the first launch on several of them does it by itself. With `bandwidth=True`, or a number of
    ranks, they measure how fast their collectives are, which takes some ten; `labkit.plan` predicts with it.
    """
    here = hardware()
    if preflight:
        _preflight.preflight(here, here.default_ranks, here.backend)
    if bandwidth:
        _bandwidth.measure_link(None if bandwidth is True else bandwidth, machine=here)
    return Machine(here)


@dataclass(frozen=True)
class Machine:
    """`findings` are `(what, value, advice)`, advice empty where there is nothing to say."""

    hardware: Hardware

    @property
    def gpu_count(self) -> int:
        return len(self.hardware.gpus)

    @property
    def findings(self) -> list[tuple[str, str, str]]:
        here = self.hardware
        return [
            ("platform", here.platform, _platform_advice(here)),
            ("devices", _devices(here), _device_advice(here)),
            ("backend", here.backend, "" if here.gpus else "gloo: ranks train on the CPU, right but not fast"),
            ("precision", here.precision, _precision_advice(here)),
            ("ranks", str(here.default_ranks), "what nproc_per_node='auto' starts"),
            ("preflight", *_preflight_finding(here)),
            *_links(here),
            ("cores", str(here.cores), f"OMP_NUM_THREADS = cores / ranks = {max(1, here.cores // here.default_ranks)}"),
            ("memory", f"{words.gib(here.memory_available)} free of {words.gib(here.memory)}", ""),
            ("/dev/shm", words.gib(here.shared_memory), _shm_advice(here)),
            ("open files", *_open_files()),
            ("versions", _versions(), _version_advice()),
            ("front end", FRONT_ENDS[ui()], f"runs {'end with' if is_headless() else 'outlive'} this process"),
            *(
                [("environment", ", ".join(left), "left over; not passed on to the ranks")]
                if (left := _leftovers())
                else []
            ),
        ]

    def __str__(self) -> str:
        width = max(len(what) for what, _, _ in self.findings)
        return "\n".join(
            f"{what:<{width}}  {value}" + (f"   ({advice})" if advice else "") for what, value, advice in self.findings
        )

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        cell = 'style="text-align:left;padding:2px 10px"'
        rows = "".join(
            f"<tr><th {cell}>{html.escape(what)}</th><td {cell}>{html.escape(value)}</td>"
            f'<td {cell}><span style="opacity:.75">{html.escape(advice)}</span></td></tr>'
            for what, value, advice in self.findings
        )
        return {"text/plain": str(self), "text/html": f"<table>{rows}</table>"}


def _preflight_finding(here: Hardware) -> tuple[str, str]:
    found = _preflight.remembered(here, here.default_ranks, here.backend)
    if found is None:
        return "not done yet", "labkit doctor --preflight lets the ranks meet and sum a number"
    when = datetime.fromtimestamp(found.when).strftime("%Y-%m-%d %H:%M")
    return str(found), f"asked on {when}; kept until the GPUs or torch change"


def _links(here: Hardware) -> list[tuple[str, str, str]]:
    """A row for each kind of collective between as many ranks as have been measured."""
    links = _bandwidth.remembered_links(here)
    if not links:
        return [("bandwidth", "not measured yet", "labkit doctor --bandwidth measures the collectives of the ranks")]
    return [
        (f"{kind} of {link.ranks}", str(line), f"latency + bytes / bandwidth, off by {line.residual:.0%}")
        for link in links
        for kind, line in link.kinds.items()
    ]


def _devices(here: Hardware) -> str:
    if not here.gpus:
        return "no GPU"
    return ", ".join(
        f"{gpu.name} ({words.gib(gpu.memory)}, sm_{gpu.capability[0]}{gpu.capability[1]})" for gpu in here.gpus
    )


def _device_advice(here: Hardware) -> str:
    if here.gpu_problem:
        return here.gpu_problem
    if here.visible_devices is not None:
        return f"CUDA_VISIBLE_DEVICES={here.visible_devices!r} decides what is seen"
    return ""


def _platform_advice(here: Hardware) -> str:
    return {
        "windows": "torch.distributed has no NCCL on native Windows: use WSL2",
        "macos": "ranks train on the CPU with gloo",
        "wsl2": "keep run folders off /mnt/c: writes there are slow",
    }.get(here.platform, "")


def _precision_advice(here: Hardware) -> str:
    return {
        "fp32": "fp16 has no gain on a CPU; bf16 works and is slower on most",
        "fp16": "no bf16 in this hardware; fp16 with the scripts' gradient scaler",
        "bf16": "no gradient scaler needed",
    }[here.precision]


def _shm_advice(here: Hardware) -> str:
    if here.shared_memory is not None and here.shared_memory < SMALL_SHM:
        return "small: DataLoader workers may die with a bus error; in docker use --shm-size=2g"
    return ""


def _open_files() -> tuple[str, str]:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = "few: DataLoader workers share tensors through them; `ulimit -n 4096` before starting Jupyter"
    return f"{allowed:,}", few if allowed < FEW_FILES else ""


def _versions() -> str:
    return ", ".join([f"Python {sys.version.split()[0]}", *(f"{name} {_version(name)}" for name in PACKAGES)])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _version_advice() -> str:
    if _version("torch") == "missing":
        return f"install torch: {sys.executable} -m pip install torch"
    if _version("ipykernel") in ("7.0.0", "7.0.1"):
        return "this ipykernel cannot update widgets from a thread; install another"
    return ""


def _leftovers() -> list[str]:
    return sorted(k for k in os.environ if k in LEFTOVERS or k.startswith(LEFTOVER_PREFIXES))
