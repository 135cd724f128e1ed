"""The doctor: what this machine has, what to use on it, what will go wrong."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from labkit.diagnosis import Diagnosis, MachineFacts, diagnose, gather
from labkit.diagnosis.shown import as_html, as_text
from labkit.launcher.hardware import Hardware, hardware
from labkit.launcher.link import bandwidth as _bandwidth
from labkit.launcher.link import preflight as _preflight

__all__ = ["Machine", "doctor"]


def doctor(*, preflight: bool = False, bandwidth: bool | int = False) -> Machine:
    """Look at this machine. The result shows itself as a table and says what to use here.

    With `preflight=True` as many ranks as `nproc_per_node="auto"` would start meet and sum a number, which takes some
    five seconds; with GPUs the first launch on several of them does it by itself. With `bandwidth=True`, or a number of
    ranks, they measure how fast their collectives are, which takes some ten; `labkit.plan` predicts with it.
    """
    here = hardware()
    if here.platform != "windows":  # where nothing can be started
        if preflight:
            _preflight.preflight(here, here.default_ranks, here.backend)
        if bandwidth:
            _bandwidth.measure_link(None if bandwidth is True else bandwidth, machine=here)
    return Machine(here, gather(here))


@dataclass(frozen=True)
class Machine:
    """What the doctor found. `facts` is everything it asked, `diagnosis` the Findings, what needs doing first."""

    hardware: Hardware
    facts: MachineFacts = field(default=None)  # type: ignore[assignment]  # asked now where not given

    def __post_init__(self) -> None:
        if self.facts is None:
            object.__setattr__(self, "facts", gather(self.hardware))

    @property
    def gpu_count(self) -> int:
        return len(self.hardware.gpus)

    @cached_property
    def diagnosis(self) -> tuple[Diagnosis, ...]:
        return diagnose(self.facts)

    @property
    def findings(self) -> list[tuple[str, str, str]]:
        """`(what, value, advice)` of each Diagnosis, advice empty where there is nothing to say."""
        return [(each.what, each.value, "; ".join(filter(None, (each.why, each.todo)))) for each in self.diagnosis]

    @property
    def can_train(self) -> bool:
        """Whether a launch as it is by default would get as far as training."""
        return all(finding.level != "stop" for finding in self.diagnosis)

    def to_json(self) -> str:
        """The findings, and the facts they were made from: what to attach to a report about this machine."""
        told = {"findings": [asdict(finding) for finding in self.diagnosis], "facts": self.facts.to_json()}
        return json.dumps(told, indent=2)

    def __str__(self) -> str:
        return as_text(self._headline(), self.diagnosis)

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": as_html(self._headline(), self.diagnosis)}

    def _headline(self) -> str:
        """`2 x Tesla T4, nccl, fp16, 2 ranks on 4 cores`"""
        here = self.hardware
        if here.platform == "windows":
            return "native Windows"
        names = Counter(gpu.name for gpu in here.gpus).items()
        gpus = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names) or "no GPU"
        ranks, cores = here.default_ranks, here.cores
        return (
            f"{gpus}, {here.backend}, {here.precision}, {ranks} rank{'s' if ranks > 1 else ''} on "
            f"{cores} core{'s' if cores > 1 else ''}"
        )
