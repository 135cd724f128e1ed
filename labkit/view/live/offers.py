"""Offers to chart what a script only prints."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from labkit.frontend import ui
from labkit.metric_names import TRAINED, better, parted
from labkit.record import RunReader

MOST = 3
# Measured already, about no result, or as often the word for something else.
NOT_OFFERED = {"throughput", "second", "latency", "runtime", "time", "step", "steps", "epoch", "samples", "size", "lr"}
NOT_OFFERED |= {"error", "errors", "err", "map", "ap", "precision"}


def in_log(reader: RunReader) -> str:
    """Names metrics that are in the log of rank 0 and in no chart, and the call that charts them, which a terminal has
    to complete with the run; empty if there are none."""
    known = {_canonical(name) for history in reader.reporting for name in history.values}
    numbers = reader.numbers_in_log()
    names = {
        _canonical(name): name for name in numbers if _is_metric(name) and not _is_charted(name, numbers[name], reader)
    }
    evaluated_first = sorted(names, key=lambda metric: not metric[0])
    new = [names[metric] for metric in evaluated_first if metric not in known][:MOST]
    if not new:
        return ""
    are, which = ("is", "it") if len(new) == 1 else ("are", "each")
    named = " and ".join(filter(None, (", ".join(new[:-1]), new[-1])))
    run = "run" if ui() != "text" else f'labkit.attach("{reader.folder.id.partition("-")[2]}")'
    return f'{named} {are} in the log; chart {which} by `{run}.metric("{new[0]}", from_log=True)`'


def _is_metric(name: str) -> bool:
    """Whether the name is that of a result, such as an accuracy, or of anything that is evaluated. The loss of the
    training is charted anyway."""
    data, metric = _canonical(name)
    if data:
        return metric.split("_")[-1] not in NOT_OFFERED
    return better(metric) is not None and not {*metric.split("_")} & (NOT_OFFERED | {"loss"})


def _is_charted(name: str, printed: Sequence[Decimal], reader: RunReader) -> bool:
    """Whether a name that says nothing of the data, such as `fid`, has the numbers of a charted metric, such as
    `val/fid`. The newest of them may not have been printed or recorded yet."""
    charted = [
        value
        for history in reader.reporting
        for each, series in history.scalars.items()
        if parted(each.lower())[1] == name.lower()
        for *_, value in series.points()
    ]
    return any(_is_rounded(number, value) for number in printed[-2:] for value in charted)


def _is_rounded(printed: Decimal, value: float) -> bool:
    """Whether a value is printed like this."""
    exponent = printed.as_tuple().exponent
    return isinstance(exponent, int) and abs(value - float(printed)) <= 0.500001 * 10.0**exponent


def _canonical(name: str) -> tuple[str, str]:
    data, metric = parted(name.lower())
    return ("" if data in TRAINED else data), metric
