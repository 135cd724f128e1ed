"""All the doctor knows of a machine: plain values, gathered once, written as JSON and read back to be looked at again.

A fact is a field here and a function of the same name in `probes.py`. None: it could not be asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from labkit.launcher.hardware import Gpu, Hardware

__all__ = [
    "UNLIMITED",
    "Card",
    "MachineFacts",
    "Kaggle",
    "NotebookKernel",
    "GpuLink",
    "Nvml",
    "Process",
    "TorchBuild",
    "nvml_from_json",
]

UNLIMITED = -1


@dataclass(frozen=True)
class TorchBuild:
    """The CUDA that torch is built for, None for a build without; its `kernels` ("sm_75"); the GPUs it sees."""

    cuda: str | None
    kernels: tuple[str, ...]
    uuids: tuple[str, ...]


@dataclass(frozen=True)
class Process:
    """On a GPU. `name` is None when it is not of this container; `run` is the id of the labkit run it belongs to;
    `mine`: it is the process that asked."""

    pid: int
    memory: int | None
    name: str | None = None
    run: str | None = None
    mine: bool = False


@dataclass(frozen=True)
class Card:
    """A GPU as NVML tells of it: bytes, percent, watts, degrees Celsius."""

    index: int
    name: str | None
    uuid: str | None
    memory: int | None
    free: int | None
    utilisation: float | None
    power: float | None
    temperature: float | None
    processes: tuple[Process, ...] | None


@dataclass(frozen=True)
class GpuLink:
    """Between two GPUs, as `nvidia-smi topo` names the path (PIX, PXB, PHB, NODE, SYS); `peer`: each reads the other's
    memory."""

    first: int
    second: int
    path: str | None
    peer: bool | None
    nvlink: bool | None


@dataclass(frozen=True)
class Nvml:
    """`cuda` is the newest that the driver knows."""

    driver: str | None
    cuda: str | None
    cards: tuple[Card, ...] = ()
    links: tuple[GpuLink, ...] = ()


@dataclass(frozen=True)
class NotebookKernel:
    """The process that asks: whether torch holds CUDA in it, and bytes of its allocator on each GPU."""

    cuda: bool
    allocated: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()


@dataclass(frozen=True)
class Kaggle:
    """`session_seconds` since its oldest process began, of `session_length`, which is None when
    LABKIT_SESSION_SECONDS is no number; `disk_free` of /kaggle/working by its file system,
    `disk_used` by its files; `inputs` are the folders in /kaggle/input, `data_sets` those `labkit.fetch` knows."""

    run_type: str
    session_seconds: float | None
    session_length: float | None
    disk_free: int | None
    disk_used: int | None
    internet: bool | None
    tpu: bool | None
    inputs: tuple[str, ...] = ()
    data_sets: tuple[str, ...] = ()


@dataclass(frozen=True)
class MachineFacts:
    """Of one machine at one moment. Sizes in bytes; UNLIMITED where there is no limit; `problems` names each fact that
    could not be asked and why."""

    hardware: Hardware
    release: str | None = None  # of the kernel
    python: str | None = None
    packages: Mapping[str, str | None] | None = None
    torch_build: TorchBuild | None = None
    nvml: Nvml | None = None
    kernel: NotebookKernel | None = None
    kaggle: Kaggle | None = None
    cores_of_machine: int | None = None
    memory_limit: int | None = None  # by the control group, where it is less than the machine's memory
    address_space: int | None = None  # of one process: `ulimit -v`
    locked_memory: int | None = None
    open_files: int | None = None
    runs_filesystem: str | None = None
    runs_free: int | None = None  # bytes for runs and their checkpoints
    refusals: Mapping[str, str] | None = None  # what a launch would refuse now: what is wrong with it, in a sentence
    wslconfig: str | None = None  # what is wrong with it, "" when nothing is
    front_end: str | None = None
    is_headless: bool | None = None
    leftovers: tuple[str, ...] | None = None
    nccl_settings: Mapping[str, str] | None = None
    preflight: Mapping[str, Any] | None = None
    bandwidth: Mapping[str, str] | None = None
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def cards(self) -> tuple[Card, ...]:
        """NVML's view of the GPUs that ranks would use: it lists all there are, whatever CUDA_VISIBLE_DEVICES says."""
        known = self.nvml.cards if self.nvml else ()
        uuids = self.torch_build.uuids if self.torch_build else ()
        used = tuple(card for card in known if card.uuid and card.uuid.removeprefix("GPU-") in uuids)
        return used or (known if self.hardware.gpus else ())

    @property
    def ranks(self) -> int:
        return self.hardware.default_ranks

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MachineFacts:
        """Raises TypeError for what is none of a machine's facts."""
        nested = {
            "hardware": _hardware,
            "torch_build": _of(TorchBuild),
            "nvml": nvml_from_json,
            "kernel": _of(NotebookKernel),
            "kaggle": _of(Kaggle),
            "leftovers": tuple,
        }
        return cls(**{k: nested[k](v) if k in nested and v is not None else v for k, v in value.items()})


def _of(kind: Any) -> Any:
    """A constructor from JSON, which has lists where the classes have tuples."""
    return lambda value: kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in value.items()})


def _hardware(value: Mapping[str, Any]) -> Hardware:
    gpus = (Gpu(gpu["name"], gpu["memory"], (gpu["capability"][0], gpu["capability"][1])) for gpu in value["gpus"])
    return Hardware(**{**value, "gpus": tuple(gpus)})


def nvml_from_json(value: Mapping[str, Any]) -> Nvml:
    cards = tuple(Card(**{**card, "processes": _processes(card["processes"])}) for card in value["cards"])
    return Nvml(value["driver"], value["cuda"], cards, tuple(GpuLink(**link) for link in value["links"]))


def _processes(value: list[dict[str, Any]] | None) -> tuple[Process, ...] | None:
    return None if value is None else tuple(Process(**each) for each in value)
