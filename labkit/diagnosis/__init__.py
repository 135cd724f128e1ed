"""The doctor: facts are gathered once, and small pure functions of them produce findings.

A new detection is one function with `@detection` in the file of its topic, and a machine in `tests/unit/machines` for
which it reports a finding. The order of the imports determines the order of findings with equal level.
"""

from __future__ import annotations

# isort: off
from labkit.diagnosis import platforms, devices, kernel, processes, links, memory, wsl, kaggle, versions  # noqa: F401

# isort: on
from labkit.diagnosis.detections import Diagnosis, Level, detection, diagnose
from labkit.diagnosis.facts import MachineFacts
from labkit.diagnosis.probes import gather

__all__ = ["MachineFacts", "Diagnosis", "Level", "detection", "diagnose", "gather"]
