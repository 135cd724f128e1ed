"""What the doctor finds: facts are gathered once, and small pure functions of them say what they mean.

A new detection is one function with `@detection` in the file of its topic, and a machine in `tests/unit/machines` on
which it has something to say. The order of the imports is that in which findings of one level are shown.
"""

from __future__ import annotations

# isort: off
from labkit.diagnosis import platforms, devices, kernel, processes, links, memory, wsl, kaggle, versions  # noqa: F401

# isort: on
from labkit.diagnosis.facts import Facts, gather
from labkit.diagnosis.finding import Finding, Level, detection, diagnose

__all__ = ["Facts", "Finding", "Level", "detection", "diagnose", "gather"]
