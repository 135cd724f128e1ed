"""Which differences between runs are larger than the noise between repeats of the same run."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import mean, variance
from typing import Any

from labkit.record.records import finite
from labkit.record.text import plain

__all__ = ["findings", "is_tested", "tested_name"]

FIGURES = {"training_seconds": "training time", "throughput": "samples/s", "memory_peak": "peak memory"}
TIMES_NOISE = 2.0
LONGEST_NAME = 40


def findings(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences, when at least one run was repeated; the first runs are what others are measured against.

    Repeats are runs of the same script text, arguments and number of ranks. The noise is the standard deviation
    within repeats, pooled over all groups that have any; a difference of means counts when it is larger than twice its
    standard error.
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    for summary in summaries:
        if summary["state"] == "succeeded":
            groups.setdefault(summary["recipe"], []).append(summary)
    if len(groups) < 2 or all(len(group) < 2 for group in groups.values()):
        return []
    base, *others = groups.values()
    tested = {name: tested_name(name) for summary in summaries for name in summary if is_tested(name)}
    return [
        finding
        for other in others
        for figure, name in (FIGURES | tested).items()
        if (finding := _difference(figure, name, base, other, groups.values()))
    ]


def is_tested(name: str) -> bool:
    """Whether a reported value is a measurement on the test set."""
    return name.startswith("test_") and name != "test_samples"


def tested_name(name: str) -> str:
    """`test accuracy`"""
    return plain(" ".join(name.replace("_", " ").split()))[:LONGEST_NAME]


def _difference(figure: str, label: str, base: list[dict[str, Any]], other: list[dict[str, Any]], groups: Any) -> str:
    values = [[v for s in group if (v := finite(s.get(figure))) is not None] for group in groups]
    ours, theirs = ([v for s in group if (v := finite(s.get(figure))) is not None] for group in (base, other))
    degrees = sum(len(group) - 1 for group in values if len(group) > 1)
    if not degrees or not ours or not theirs or not mean(ours):
        return ""
    noise = sqrt(sum(variance(group) * (len(group) - 1) for group in values if len(group) > 1) / degrees)
    change, error = mean(theirs) - mean(ours), noise * sqrt(1 / len(ours) + 1 / len(theirs))
    real = abs(change) > TIMES_NOISE * error
    name, against = _name(other), _name(base)
    size = f"{change / mean(ours):+.1%}, repeats differ by {noise / mean(ours):.1%}"
    verdict = "more than noise" if real else "within the noise"
    return f"{label} of {name} against {against}: {size}: {verdict}"


def _name(group: list[dict[str, Any]]) -> str:
    first, runs = group[0], f"{len(group)} run{'' if len(group) == 1 else 's'}"
    nodes = f" on {first['nodes']} nodes" if first["nodes"] > 1 else ""
    return f"{first['script']} on {first['ranks']} ranks{nodes} ({runs})"
