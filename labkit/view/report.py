"""Makes the static, script-free view of a run in a saved notebook, and `report.html`: one interactive file for offline
use, whose content security policy allows only its two scripts, by their hashes."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

from labkit import words
from labkit.errors import LabError
from labkit.files import read_json, read_source, read_text
from labkit.record import RunFolder, RunReader, State
from labkit.spans import COMMUNICATION
from labkit.text import escaped, plain
from labkit.view.charts.bands import Line, columns, outlier, ranges
from labkit.view.charts.bars import Bar, bars
from labkit.view.charts.images import Palette, as_image
from labkit.view.charts.svg import Chart, are_banded
from labkit.view.live.hosts import by_host, host_memory, rank_ranges
from labkit.view.live.page import run_html, run_text, tail_of_log
from labkit.view.live.run_charts import Look, charts_svg, run_charts
from labkit.view.timeline import Timeline
from labkit.witness import Findings

REPORT_LOG_LINES = 200
MOST_PICTURED = 8
PNG_COLOURS = 32  # enough for lines and text; a notebook stores every picture
STYLE = (
    ".charts{display:flex;flex-wrap:wrap;gap:4px 20px}.charts figure{margin:0;width:430px;max-width:100%}"
    ".charts .wide{width:100%}.charts svg{width:100%;height:auto;touch-action:pan-y;cursor:crosshair;font-size:10px;"
    "fill:currentColor;user-select:none}figcaption{font-size:12px}small,.read{opacity:.75}"
    ".read{display:block;min-height:2.6em;font-size:12px;font-variant-numeric:tabular-nums}.read span{margin-left:1em}"
    "i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:4px}"
    "button{font:inherit;font-size:12px;margin-right:4px;border:1px solid #8b949e80;border-radius:10px;background:none;"
    "color:inherit}button[aria-pressed=false]{opacity:.6;text-decoration:line-through}"
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:"
LIBRARY = Path(__file__).with_name("report.js")
AXES = ("time", "step")
UNITS = {"step time": "s"}
CATEGORIES = ("parameters", "gradients", "optimizer")


class ReportPath(type(Path())):  # type: ignore[misc]
    """A path that a notebook shows as a link."""

    def _repr_html_(self) -> str:
        link = escaped(os.path.relpath(self))
        hint = "In JupyterLab, click “Trust HTML” above the report to make its charts interactive."
        return f'<a href="{link}" target="_blank">{link}</a><div style="opacity:.75">{hint}</div>'


def static_bundle(folder: RunFolder, reader: RunReader, state: State) -> dict[str, str]:
    """The MIME bundle that replaces the live view: HTML with images, PNG, plain text; no scripts, no widgets."""
    page = run_html(folder, reader, state, watched=state.is_final)
    bundle = {"text/html": as_image(page), "text/plain": run_text(folder, reader, state)}
    picture = _png(reader)
    return bundle | ({"image/png": picture} if picture else {})


def write_report(folder: RunFolder) -> Path:
    """Write one HTML file about the run that opens offline: figures, cause, script, parameters, logs.

    The charts answer to the pointer, and are pictures where scripts may not run.
    """
    reader, state = RunReader(folder, each_rank=True).read_all(), State.read(folder)
    manifest, latest = folder.read_manifest(), folder.latest
    logs = {rank: "\n".join(tail_of_log(latest, rank, REPORT_LOG_LINES)) for rank in latest.started_ranks()}
    facts = {
        "name": manifest.name,
        "created": manifest.created,
        "world_size": words.ranks(manifest.world_size, state.ranks),
        "devices": list(manifest.devices),
        "cwd": manifest.cwd,
        **manifest.versions,
        **manifest.parameters,
        **manifest.env,
    }
    rows = "".join(f"<tr><th>{_escaped(name)}</th><td>{_escaped(value)}</td></tr>" for name, value in facts.items())
    places, scripts = _interactive(reader)
    sections = {
        "Findings": found._repr_html_() if (found := Findings.read(latest)) else "",
        "Figures": places,
        "Facts": f"<table>{rows}</table>",
        "Command": f"<pre>{escaped(_text(folder.command))}</pre>",
        "Record": _folded("run.json", json.dumps(read_json(folder.manifest), indent=1)),
        "Script": _folded("script.py", _text(folder.script, read_source)),
        "Logs": _logs(reader, logs),
    }
    body = "".join(f"<h2>{title}</h2>{text}" for title, text in sections.items() if text)
    hashes = "".join(f" 'sha256-{base64.b64encode(sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = POLICY + (f"; script-src{hashes}" if hashes else "")
    new = folder.report.with_name(".report.html")
    new.unlink(missing_ok=True)
    new.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escaped(folder.id)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<style>:root{color-scheme:light dark}body{font-family:system-ui,sans-serif;max-width:900px;margin:2em auto;"
        "padding:0 1em}pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px}"
        "th{text-align:left;font-weight:400;opacity:.7;padding-right:1em}"
        f"{STYLE}</style>"
        f"<h1>{_escaped(manifest.name)}</h1>"
        f"{run_html(folder, reader, state, with_log=False, with_charts=not places)}{body}"
        + "".join(f"<script>{script}</script>" for script in scripts)
        + "</html>",
        encoding="utf-8",
    )
    new.replace(folder.report)  # replaces whatever is there, even a symlink, instead of writing through it
    return ReportPath(folder.report)


def _logs(reader: RunReader, logs: dict[int, str]) -> str:
    """One folded log per rank; with several hosts, also folded by host."""
    folded = {rank: _folded(f"rank {rank}", text) for rank, text in logs.items()}
    hosts = by_host(reader.ranks.values())
    if len(hosts) < 2:
        return "".join(folded.values())
    page = ""
    for host, histories in hosts.items():
        ranks = [h.rank for h in histories if h.rank in folded]
        inside = "".join(folded.pop(rank) for rank in ranks)
        page += f"<details><summary>{escaped(host)}, ranks {rank_ranges(ranks)}</summary>{inside}</details>"
    return page + "".join(folded.values())


def _text(path: Path, read: Callable[[Path], str] = read_text) -> str:
    try:
        return read(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _interactive(reader: RunReader) -> tuple[str, list[str]]:
    """`(charts, scripts)`: the charts as pictures, and what makes them answer to the pointer: the library, and the call
    with the data."""
    if not any(history.step for history in reader.ranks.values()):
        return "", []
    # without "<" no name can end the script element
    data = json.dumps(chart_data(reader), separators=(",", ":")).replace("<", "\\u003c")
    return still_charts(reader), [LIBRARY.read_text(encoding="utf-8"), f"draw({data})"]


def _escaped(value: Any) -> str:
    return escaped(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escaped(title)}</summary><pre>{escaped(text)}</pre></details>"


def _png(reader: RunReader) -> str | None:
    """The charts as PNG, for viewers that strip HTML (mail, code hosting); None without data or matplotlib."""
    if not any(history.step for history in reader.ranks.values()):
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from PIL import Image  # matplotlib's own dependency
    except ImportError:
        return None
    drawn = run_charts(reader, Look())
    banded = are_banded(drawn)
    drawn = drawn[:MOST_PICTURED]
    rows = (len(drawn) + 1) // 2
    figure = Figure(figsize=(7.6, 1.7 * rows), dpi=64, layout="constrained")  # pyplot has global state
    for axes, chart, is_band in zip(figure.subplots(rows, 2).flat, drawn, banded, strict=False):
        if is_band:
            _band(axes, chart)
        for rank, series in chart.series.items() if not is_band else ():
            points = series.points()
            axes.plot([p[0] for p in points], [p[3] for p in points], label=chart.label(rank), linewidth=1)
        if chart.evaluated:
            points = chart.evaluated.points()
            axes.plot([p[0] for p in points], [p[3] for p in points], label="evaluated", linewidth=2, color="black")
        axes.set_title(chart.title, fontsize=8, loc="left")
        axes.yaxis.set_major_formatter(lambda value, _, show=chart.show: show(value))
        axes.tick_params(labelsize=7)
        if chart.from_zero:
            axes.set_ylim(bottom=min(0.0, *axes.get_ylim()))
    figure.axes[0].legend(fontsize=7)
    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out)
    small = io.BytesIO()
    Image.open(out).convert("RGB").quantize(PNG_COLOURS).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def _band(axes: Any, chart: Chart) -> None:
    """Draw the minimum, maximum and median, for more ranks than distinguishable lines."""
    grid = [(x, [*column.values()]) for x, column in columns(chart.series)]
    times = [x for x, _ in grid]
    lows, highs = ([pick(v[i] for v in values) for _, values in grid] for i, pick in ((0, min), (1, max)))
    axes.fill_between(times, lows, highs, alpha=0.3, linewidth=0, label=f"all {len(chart.series)} ranks")
    axes.plot(times, [median(v[2] for v in values) for _, values in grid], linewidth=1, label="median")


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
        {
            "name": name,
            "colour": Palette.LINES[style % 8],
            "dash": Palette.DASHES[style // 8 % 8],
            "width": 1.6,
            "points": points,
        }
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
    if len(chart.series) <= Palette.MOST_LINES:
        for rank, line in chart.series.items():
            yield chart.label(rank), _points(line, chart.unit)
        return
    hosts = by_host(reader.ranks.values())
    if 1 < len(hosts) <= Palette.MOST_LINES:
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
    memory = {f"rank {h.rank}": each for h in reader.ranks.values() if (each := host_memory(reader, h))}
    hosts = "; ".join(f"{rank} {each}" for rank, each in [*memory.items()][:64])
    below = f"<p>Host memory, with the workers of DataLoaders (PSS, peak): {hosts}</p>" if hosts else ""
    return f"<h3>Memory per rank</h3>{bars(drawn[:64], min(limits, default=None), 'limit', shown)}{below}"


def _timeline(timeline: Timeline) -> dict[str, Any]:
    spans, ranks = timeline.of_step(), timeline.ranks
    kinds = {span.kind for span in spans}
    return {
        "title": f"step {timeline.step}: what every rank did",
        "note": "computation above, communication below",
        "kinds": [[kind.replace("_", "-"), colour] for kind, colour in Palette.SPANS.items() if kind in kinds],
        "rows": [f"rank {rank}" for rank in ranks],
        "bars": [
            [
                _short(span.start * 1e3),
                _short(span.end * 1e3),
                ranks.index(span.rank),
                int(span.kind in COMMUNICATION),
                Palette.SPANS[span.kind],
                plain(f"{span.kind.replace('_', '-')} {span.label}: {span.seconds * 1e3:.3g} ms"),
            ]
            for span in spans
        ],
    }
