"""The doctor: facts are gathered once, and small pure functions of them produce findings.

A new detection is one function with `@detection` in the file of its topic in `findings/`, and a machine in
`tests/unit/machines` for which it reports a finding.
"""

from __future__ import annotations

from labkit.diagnosis import findings  # noqa: F401  # registers the detections
from labkit.diagnosis.detections import Diagnosis, Level, detection, diagnose
from labkit.diagnosis.facts import MachineFacts
from labkit.diagnosis.probes import gather

__all__ = ["MachineFacts", "Diagnosis", "Level", "detection", "diagnose", "gather"]
