"""Which differences between runs are larger than the noise between repeats of the same run."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import mean, variance
from typing import Any

from labkit.record.records import finite

__all__ = ["findings"]

# What is compared, and whether more of it is better.
FIGURES = {"training_seconds": "training time", "throughput": "samples/s", "test_accuracy": "test accuracy",
           "memory_peak": "peak memory"}  # fmt: skip
TIMES_NOISE = 2.0


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
    return [
        said for other in others for figure in FIGURES if (said := _difference(figure, base, other, groups.values()))
    ]


def _difference(figure: str, base: list[dict[str, Any]], other: list[dict[str, Any]], groups: Any) -> str:
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
    return f"{FIGURES[figure]} of {name} against {against}: {size}: {verdict}"


def _name(group: list[dict[str, Any]]) -> str:
    first, runs = group[0], f"{len(group)} run{'' if len(group) == 1 else 's'}"
    nodes = f" on {first['nodes']} nodes" if first["nodes"] > 1 else ""
    return f"{first['script']} on {first['ranks']} ranks{nodes} ({runs})"
