"""Defines the doctor's findings, and lists the functions that produce them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from labkit.diagnosis.facts import MachineFacts
from labkit.hardware import GpusUnknownError

__all__ = ["LEVELS", "Detection", "Diagnosis", "Level", "detection", "diagnose"]

Level = Literal["stop", "warning", "note", "fine"]
LEVELS: tuple[Level, ...] = ("stop", "warning", "note", "fine")


@dataclass(frozen=True)
class Diagnosis:
    """`what` was checked, its `value`, `why` it matters, and what `todo`.

    `level`: "stop", `labkit.launch` with its defaults would be refused or fail; "warning", something will go wrong or
    be slow; "note", good to know; "fine", a fact.
    """

    what: str
    value: str
    why: str = ""
    todo: str = ""
    level: Level = "fine"


Detection = Callable[[MachineFacts], Diagnosis | Iterable[Diagnosis] | None]
_detections: list[Detection] = []


def detection(function: Detection) -> Detection:
    """Register a detection: a pure function of facts that returns None, a Diagnosis or several."""
    _detections.append(function)
    return function


def diagnose(facts: MachineFacts) -> tuple[Diagnosis, ...]:
    """All findings, the most urgent first."""
    findings = [finding for function in _detections for finding in _findings_of(function, facts)]
    if facts.hardware.platform == "windows":  # labkit does not run there, so nothing else matters
        findings = [finding for finding in findings if finding.level == "stop"]
    return tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.level)))


def _findings_of(function: Detection, facts: MachineFacts) -> tuple[Diagnosis, ...]:
    try:
        result = function(facts)
        return () if result is None else (result,) if isinstance(result, Diagnosis) else tuple(result)
    except GpusUnknownError:  # the detection `devices` says why
        return ()
    except Exception as error:  # one failing detection must not hide the others
        name = function.__name__.replace("_", " ")
        return (Diagnosis(name, "n/a", f"the detection failed: {error!r}", "report this", "note"),)
