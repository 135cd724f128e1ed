"""The doctor: what this machine has, what to use on it, which problems to expect."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from labkit.arguments import checked
from labkit.dataclass_json import to_json
from labkit.diagnosis import Diagnosis, MachineFacts, as_html, as_text, diagnose, gather
from labkit.files import Json
from labkit.hardware import Hardware, hardware
from labkit.link import measure_link, try_link


@checked()
def doctor(*, preflight: bool = False, bandwidth: bool | int = False) -> Machine:
    """Inspect this machine. The result is displayed as a table and says which settings to use here.

    With `preflight=True`, the ranks of `nproc_per_node="auto"` sum a number, which takes about 5 seconds; on several
    GPUs a launch does so until it has worked once. With `bandwidth=True`, or a number of ranks, they measure the speed
    of their collectives, which takes about 10 seconds; `labkit.plan` then uses it.
    """
    here = hardware(may_be_unknown=True)
    if here.platform != "windows":  # where nothing can be started
        if preflight:
            try_link(here, here.default_ranks, here.backend)
        if bandwidth:
            measure_link(None if bandwidth is True else bandwidth, machine=here)
    return Machine(here, gather(here))


@dataclass(frozen=True)
class Machine:
    """The doctor's result. `facts` is everything that it gathered, `diagnosis` the findings, most urgent first."""

    hardware: Hardware
    facts: MachineFacts = field(default=None)  # type: ignore[assignment]  # gathered now if missing

    def __post_init__(self) -> None:
        if self.facts is None:
            object.__setattr__(self, "facts", gather(self.hardware))

    @cached_property
    def diagnosis(self) -> tuple[Diagnosis, ...]:
        return diagnose(self.facts)

    @property
    def findings(self) -> list[tuple[str, str, str]]:
        """`(what, value, advice)` of each Diagnosis; advice may be empty."""
        return [(each.what, each.value, "; ".join(filter(None, (each.why, each.todo)))) for each in self.diagnosis]

    @property
    def can_train(self) -> bool:
        """Whether a launch with default options would start to train."""
        return all(finding.level != "stop" for finding in self.diagnosis)

    def to_dict(self) -> dict[str, Json]:
        """The findings and the facts behind them, as `labkit doctor --json` prints them (docs/reference/json.md)."""
        return {
            "schema": "labkit.doctor/1",
            "can_train": self.can_train,
            "findings": [to_json(finding) for finding in self.diagnosis],
            "facts": to_json(self.facts.to_json()),
        }

    def to_json(self) -> str:
        """`to_dict` as text, to attach to a report about this machine."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

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
        cores = f"{here.cores} core{'s' if here.cores > 1 else ''}"
        if here.gpu_problem:
            return f"unknown GPUs, {cores}"
        names = Counter(gpu.name for gpu in here.gpus).items()
        gpus = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names) or "no GPU"
        ranks = here.default_ranks
        return f"{gpus}, {here.backend}, {here.precision}, {ranks} rank{'s' if ranks > 1 else ''} on {cores}"
