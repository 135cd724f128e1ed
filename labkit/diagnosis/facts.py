"""Holds the facts about a machine: plain values, gathered once; they can be written as JSON.

A fact is a field here and a function of the same name in `probes.py`. None means that it could not be determined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from labkit.files import Json
from labkit.hardware import Hardware

UNLIMITED = -1


@dataclass(frozen=True)
class TorchBuild:
    """The CUDA version that torch is built for (None without CUDA), its `kernels` ("sm_75"), and the GPUs it sees."""

    cuda: str | None
    kernels: tuple[str, ...]
    uuids: tuple[str, ...]


@dataclass(frozen=True)
class Process:
    """A process on a GPU. `name` is None if it is outside of this container; `run` is the id of its labkit run; `mine`:
    it is the current process."""

    pid: int
    memory: int | None
    name: str | None = None
    run: str | None = None
    mine: bool = False


@dataclass(frozen=True)
class Card:
    """A GPU according to NVML, in bytes, percent, watts and degrees Celsius."""

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
    """A link between two GPUs; `path` as in `nvidia-smi topo` (PIX, PXB, PHB, NODE, SYS); `peer`: each can read the
    other's memory."""

    first: int
    second: int
    path: str | None
    peer: bool | None
    nvlink: bool | None


@dataclass(frozen=True)
class Nvml:
    """`cuda` is the newest version that the driver supports."""

    driver: str | None
    cuda: str | None
    cards: tuple[Card, ...] = ()
    links: tuple[GpuLink, ...] = ()


@dataclass(frozen=True)
class NotebookKernel:
    """The current process: whether torch has initialized CUDA, and bytes of its allocator on each GPU."""

    cuda: bool
    allocated: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()


@dataclass(frozen=True)
class Kaggle:
    """`session_seconds` since its oldest process started, of `session_length`, which is None if
    LABKIT_SESSION_SECONDS is not a number; `disk_free` of /kaggle/working according to its file system, `disk_used`
    by its files; `inputs` are the folders in /kaggle/input, `data_sets` those that `labkit.fetch` knows."""

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
class Wsl:
    """`gpu_device` is the kernel's, `windows_driver` NVIDIA's for Windows; `linux_drivers` are packages
    of its driver for Linux. `networking` is "nat" or "mirrored", `localhost_forwarding` as .wslconfig says, and
    `clock_error` the seconds by which the clock is behind the computer's."""

    gpu_device: bool
    windows_driver: bool
    linux_drivers: tuple[str, ...] = ()
    networking: str | None = None
    localhost_forwarding: bool = True
    clock_error: float | None = None


@dataclass(frozen=True)
class Preflight:
    """What a trial of the ranks' communication showed, when, and the variables with which it works, None if none."""

    said: str
    env: Mapping[str, str] | None
    when: str


@dataclass(frozen=True)
class MachineFacts:
    """Facts about one machine at one moment. Sizes in bytes; UNLIMITED if there is no limit; `problems` has the reason
    for each fact that could not be determined."""

    hardware: Hardware
    release: str | None = None  # of the kernel
    python: str | None = None
    packages: Mapping[str, str | None] | None = None
    torch_build: TorchBuild | None = None
    nvml: Nvml | None = None
    kernel: NotebookKernel | None = None
    kaggle: Kaggle | None = None
    cores_of_machine: int | None = None
    memory_limit: int | None = None  # by the control group, if less than the machine's memory
    address_space: int | None = None  # of one process: `ulimit -v`
    locked_memory: int | None = None
    open_files: int | None = None
    runs_filesystem: str | None = None
    runs_free: int | None = None  # bytes for runs and their checkpoints
    refusals: Mapping[str, str] | None = None  # what a launch would refuse now, and why
    wslconfig: str | None = None  # what is wrong with it, or ""
    wsl: Wsl | None = None
    front_end: str | None = None
    is_headless: bool | None = None
    leftovers: tuple[str, ...] | None = None
    nccl_settings: Mapping[str, str] | None = None
    preflight: Preflight | None = None
    bandwidth: Mapping[str, str] | None = None
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def cards(self) -> tuple[Card, ...]:
        """The GPUs that ranks would use, according to NVML, which ignores CUDA_VISIBLE_DEVICES."""
        known = self.nvml.cards if self.nvml else ()
        uuids = self.torch_build.uuids if self.torch_build else ()
        used = tuple(card for card in known if card.uuid and card.uuid.removeprefix("GPU-") in uuids)
        return used or (known if self.hardware.gpus else ())

    @property
    def ranks(self) -> int:
        return self.hardware.default_ranks

    @property
    def is_wsl(self) -> bool:
        """Whether this is WSL, of either version."""
        return self.hardware.platform == "wsl2"

    def to_json(self) -> dict[str, Json]:
        return asdict(self)


def nvml_from_json(value: Mapping[str, Any]) -> Nvml:
    cards = tuple(_card(card) for card in value["cards"])
    return Nvml(value["driver"], value["cuda"], cards, tuple(GpuLink(**link) for link in value["links"]))


def _card(value: Mapping[str, Any]) -> Card:
    """A GPU without what is about the moment of asking alone."""
    lasting = {name: each for name, each in value.items() if name != "throttled"}
    return Card(**lasting | {"processes": _processes(value["processes"])})


def _processes(value: list[dict[str, Any]] | None) -> tuple[Process, ...] | None:
    return None if value is None else tuple(Process(**each) for each in value)
