"""What the doctor has to say, and the list of the functions that find it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from labkit.diagnosis.facts import MachineFacts

__all__ = ["LEVELS", "Detection", "Diagnosis", "Level", "detection", "diagnose"]

Level = Literal["stop", "warning", "note", "fine"]
LEVELS: tuple[Level, ...] = ("stop", "warning", "note", "fine")


@dataclass(frozen=True)
class Diagnosis:
    """`what` was looked at and the `value` it has, `why` that matters, what `todo`.

    `level`: "stop", `labkit.launch` as it is called by default would be refused or fail; "warning", something will go
    wrong or be slow; "note", what to know before choosing; "fine", a fact.
    """

    what: str
    value: str
    why: str = ""
    todo: str = ""
    level: Level = "fine"


Detection = Callable[[MachineFacts], Diagnosis | Iterable[Diagnosis] | None]
_detections: list[Detection] = []


def detection(function: Detection) -> Detection:
    """Let the doctor call this function: pure, of facts, returning what it found: nothing, a Diagnosis or several."""
    _detections.append(function)
    return function


def diagnose(facts: MachineFacts) -> tuple[Diagnosis, ...]:
    """All findings, what needs doing first."""
    found = [finding for function in _detections for finding in _found(function, facts)]
    if facts.hardware.platform == "windows":  # nothing is started there, so nothing else matters
        found = [finding for finding in found if finding.level == "stop"]
    return tuple(sorted(found, key=lambda finding: LEVELS.index(finding.level)))


def _found(function: Detection, facts: MachineFacts) -> tuple[Diagnosis, ...]:
    try:
        said = function(facts)
        return () if said is None else (said,) if isinstance(said, Diagnosis) else tuple(said)
    except Exception as error:  # the doctor answers whatever one detection stumbles over
        name = function.__name__.replace("_", " ")
        return (Diagnosis(name, "n/a", f"could not be told from the facts: {error!r}", "report this", "note"),)
