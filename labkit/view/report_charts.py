"""Prepares the charts of `report.html` as data: report.js draws them and answers to the pointer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from labkit.errors import LabError
from labkit.record import COMMUNICATION, RunReader
from labkit.text import plain
from labkit.view.charts.bands import MANY, Line, columns, outlier, ranges
from labkit.view.charts.bars import Bar, bars, key
from labkit.view.charts.svg import COLOURS, DASHES, Chart
from labkit.view.charts.timeline_figures import KIND_COLOURS
from labkit.view.live.by_host import by_host
from labkit.view.live.run_charts import Look, charts_svg, run_charts
from labkit.view.timeline import Timeline

__all__ = ["LIBRARY", "chart_data", "still_charts"]

LIBRARY = Path(__file__).with_name("report.js")
AXES = ("time", "step")
UNITS = {"step time": "s"}
CATEGORIES = ("parameters", "gradients", "optimizer")


def still_charts(reader: RunReader) -> str:
    """What is seen without JavaScript: the charts by time, and the memory of each rank."""
    return f'<div id="charts">{charts_svg(reader, Look())}</div>{_held(reader)}'


def chart_data(reader: RunReader) -> dict[str, Any]:
    """The charts over each of AXES, and the timeline of a profiled run."""
    axes = [
        {"name": axis, "charts": [_chart(reader, each) for each in run_charts(reader, Look(axis))]} for axis in AXES
    ]
    with suppress(LabError):  # most runs were not profiled
        return {"axes": axes, "timeline": _timeline(Timeline(reader.folder))}
    return {"axes": axes}


def _chart(reader: RunReader, chart: Chart) -> dict[str, Any]:
    lines = [
        {"name": name, "colour": COLOURS[style % 8], "dash": DASHES[style // 8 % 8], "width": 1.6, "points": points}
        for style, (name, points) in enumerate(_lines(reader, chart))
    ]
    if chart.evaluated:
        points = _points(chart.evaluated, chart.unit)
        lines.append({"name": "evaluated", "colour": "currentColor", "dash": "", "width": 2.4, "points": points})
    best = chart.best_point()
    return {
        "title": plain(chart.title),
        "unit": UNITS.get(chart.title, {2**20: "MiB", 2**30: "GiB"}.get(int(chart.unit), "")),
        "note": plain(chart.note),
        "from_zero": chart.from_zero,
        "lines": lines,
        "limit": chart.limit and _short(chart.limit / chart.unit),
        "peak": chart.peak and _short(chart.peak / chart.unit),
        "marks": [[_short(x), "restarted"] for x in chart.restarts] + [[_short(x), plain(t)] for x, t in chart.changes],
        "best": best and [_short(best[0]), _short(best[1] / chart.unit)],
    }


def _lines(reader: RunReader, chart: Chart) -> Iterator[tuple[str, list[list[float]]]]:
    """A line per rank; for many ranks, the median of each host, or the lowest, median and highest of all, and the rank
    that stands out."""
    if len(chart.series) <= MANY:
        for rank, line in chart.series.items():
            yield chart.label(rank), _points(line, chart.unit)
        return
    hosts = by_host(reader.ranks.values())
    if 1 < len(hosts) <= MANY:
        for host, histories in hosts.items():
            own = {h.rank: chart.series[h.rank] for h in histories if h.rank in chart.series}
            yield plain(host), _over_ranks(own, median, 2, chart.unit)
    else:
        summaries: tuple[tuple[str, Callable[[list[float]], float], int], ...]
        summaries = (("median", median, 2), ("lowest", min, 0), ("highest", max, 1))
        for name, pick, which in summaries:
            yield f"{name} of {len(chart.series)} ranks", _over_ranks(chart.series, pick, which, chart.unit)
    grid = columns(chart.series)
    if (out := outlier(grid, ranges(grid))) is not None:
        yield chart.label(out), _points(chart.series[out], chart.unit)


def _over_ranks(series: Any, pick: Callable[[list[float]], float], which: int, unit: float) -> list[list[float]]:
    grid = columns(series, 240)
    return [[_short(x), _short(pick([each[which] for each in column.values()]) / unit)] for x, column in grid]


def _points(line: Line, unit: float) -> list[list[float]]:
    return [[_short(x), _short(last / unit)] for x, _, _, last in line.points()]


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _held(reader: RunReader) -> str:
    """Memory of each rank by what holds it. On a CPU the resident set says nothing about tensors, so only parameters,
    gradients and optimizer state are shown; on a GPU also the rest at the peak."""
    drawn = []
    for history in reader.ranks.values():
        held = {name: int(size) for name in CATEGORIES if (size := history.held.get(name)) is not None}
        if held and history.memory_name == "allocated":
            held["activations"] = max(0, int(history.memory_peak) - sum(held.values()))
        if held:
            drawn.append(Bar(f"rank {history.rank}", held))
    limits = [h.memory_limit for h in reader.ranks.values() if h.memory_limit]
    if not drawn:
        return ""
    shown = [name for name in (*CATEGORIES, "activations") if any(name in (bar.held or {}) for bar in drawn)]
    return f"<h3>Memory per rank</h3>{bars(drawn[:64], min(limits, default=None), 'limit')}{key(shown)}"


def _timeline(timeline: Timeline) -> dict[str, Any]:
    spans, ranks = timeline.of_step(), timeline.ranks
    kinds = {span.kind for span in spans}
    return {
        "title": f"step {timeline.step}: what every rank did",
        "note": "computation above, communication below",
        "kinds": [[kind.replace("_", "-"), colour] for kind, colour in KIND_COLOURS.items() if kind in kinds],
        "rows": [f"rank {rank}" for rank in ranks],
        "bars": [
            [
                _short(span.start * 1e3),
                _short(span.end * 1e3),
                ranks.index(span.rank),
                int(span.kind in COMMUNICATION),
                KIND_COLOURS[span.kind],
                plain(f"{span.kind.replace('_', '-')} {span.label}: {span.seconds * 1e3:.3g} ms"),
            ]
            for span in spans
        ],
    }
