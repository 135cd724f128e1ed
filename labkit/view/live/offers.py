"""Offers to chart what a script only prints."""

from __future__ import annotations

from labkit.metric_names import TRAINED, better, parted
from labkit.record import RunReader

MOST = 3
# Measured already, about no result, or as often the word for something else.
NOT_OFFERED = {"throughput", "second", "latency", "runtime", "time", "step", "steps", "epoch", "samples", "size", "lr"}
NOT_OFFERED |= {"error", "errors", "err", "map", "ap", "precision"}


def in_log(reader: RunReader) -> str:
    """Names metrics that are in the log of rank 0 and in no chart, and what charts them; empty if there are none."""
    known = {_canonical(name) for history in reader.reporting for name in history.values}
    names = {_canonical(name): name for name in reader.names_in_log() if _is_metric(name)}
    evaluated_first = sorted(names, key=lambda metric: not metric[0])
    new = [names[metric] for metric in evaluated_first if metric not in known][:MOST]
    if not new:
        return ""
    are, which = ("is", "it") if len(new) == 1 else ("are", "each")
    named = " and ".join(filter(None, (", ".join(new[:-1]), new[-1])))
    return f'{named} {are} in the log; chart {which} by `run.metric("{new[0]}", from_log=True)`'


def _is_metric(name: str) -> bool:
    """Whether the name is that of a result, such as an accuracy, or of anything that is evaluated. The loss of the
    training is charted anyway."""
    data, metric = _canonical(name)
    if data:
        return metric.split("_")[-1] not in NOT_OFFERED
    return better(metric) is not None and not {*metric.split("_")} & (NOT_OFFERED | {"loss"})


def _canonical(name: str) -> tuple[str, str]:
    data, metric = parted(name.lower())
    return ("" if data in TRAINED else data), metric
