"""Makes the static, script-free view of a run in a saved notebook, and `report.html`: one interactive file for offline
use, whose content security policy allows only its own script, by its hash."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from labkit import words
from labkit.charts import (
    CLIPS,
    Bar,
    Bars,
    Chart,
    Line,
    Palette,
    Picture,
    Points,
    as_image,
    beside_each_other,
    columns,
    drawn,
    lanes_picture,
    outlier,
    pictures,
    png,
    ranges,
)
from labkit.errors import LabError
from labkit.files import read_json, read_source, read_text
from labkit.record import RunFolder, RunReader, State
from labkit.text import escaped, plain
from labkit.view.live.hosts import by_host, host_memory, rank_ranges
from labkit.view.live.page import run_html, run_text, tail_of_log
from labkit.view.live.run_charts import SCALES, Look, run_charts
from labkit.view.timeline import Timeline
from labkit.witness import Findings

REPORT_LOG_LINES = 200
STYLE = (
    "figure{margin:0;flex:1 1 290px;max-width:434px}figure svg{width:100%;height:auto;touch-action:pan-y;"
    "user-select:none}figure.wide{flex:1 1 100%;max-width:760px;overflow-x:auto}.read{min-height:2.6em;font-size:12px;"
    "opacity:.75;font-variant-numeric:tabular-nums}.plot *{vector-effect:non-scaling-stroke}"
    ".plot [pointer-events] *{vector-effect:none}td{overflow-wrap:anywhere}"
    ".zoomed .window{clip-path:url(#window)}.zoomed .texts{display:none}"
    "button{font:inherit;font-size:12px;margin-right:4px;border:1px solid #8b949e80;border-radius:10px;background:none;"
    "color:inherit}button[aria-pressed=false]{opacity:.6;text-decoration:line-through}table{display:block;"
    "overflow-x:auto}"
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:"
LIBRARY = Path(__file__).with_name("report.js")
AXES = ("time", "step")
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
    moves = any(history.step for history in reader.ranks.values())
    picture = png(run_charts(reader, Look())) if moves else None
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
    charts = report_charts(reader)
    script = LIBRARY.read_text(encoding="utf-8") if charts else ""
    sections = {
        "Findings": found._repr_html_() if (found := Findings.read(latest)) else "",
        "Figures": charts + memory_held(reader),
        "Facts": f"<table>{rows}</table>",
        "Command": f"<pre>{escaped(_text(folder.command))}</pre>",
        "Record": _folded("run.json", json.dumps(read_json(folder.manifest), indent=1)),
        "Script": _folded("script.py", _text(folder.script, read_source)),
        "Logs": _logs(reader, logs),
    }
    body = "".join(f"<h2>{title}</h2>{text}" for title, text in sections.items() if text)
    allowed = base64.b64encode(sha256(script.encode()).digest()).decode()
    policy = POLICY + (f"; script-src 'sha256-{allowed}'" if script else "")
    new = folder.report.with_name(".report.html")
    new.unlink(missing_ok=True)
    new.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escaped(folder.id)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<style>:root{color-scheme:light dark}body{font:13px/1.5 system-ui,sans-serif;max-width:900px;margin:2em auto;"
        "padding:0 1em}pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px}"
        "th{text-align:left;font-weight:400;opacity:.7;padding-right:1em}"
        f"{STYLE}</style>"
        f"<h1>{_escaped(manifest.name)}</h1>"
        f"{run_html(folder, reader, state, with_log=False, with_charts=not charts)}{body}"
        + (f"<script>{script}</script>" if script else "")
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


def _escaped(value: Any) -> str:
    return escaped(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escaped(title)}</summary><pre>{escaped(text)}</pre></details>"


def report_charts(reader: RunReader) -> str:
    """Every chart over each of AXES and on each of SCALES, of which the first is seen without scripts, and the lanes of
    a profiled run."""
    if not any(history.step for history in reader.ranks.values()):
        return ""
    figures: dict[str, dict[Picture, list[str]]] = {}  # by title and picture: the looks that have it
    for axis, scale in product(AXES, SCALES):
        drawn = [_by_host(reader, chart) for chart in run_charts(reader, Look(axis, scale))]
        for chart, picture in zip(drawn, pictures(drawn, interactive=True), strict=True):
            figures.setdefault(chart.title, {}).setdefault(picture, []).append(f"{axis} {scale}")
    page = [f"<figure>{_looks(of_title)}</figure>" for of_title in figures.values()]
    with suppress(LabError):  # most runs were not profiled
        lanes = lanes_picture(Timeline(reader.folder).lanes(), titled=True)
        page.append(f'<figure class="wide">{_looks({lanes: []})}</figure>')
    return f'{CLIPS}<div id="charts">{beside_each_other(page)}</div>'


def _looks(pictures: Mapping[Picture, Sequence[str]]) -> str:
    """The pictures of one chart, all but the first hidden, and a place for the values under the pointer. These are the
    same on all scales: only the first picture over an axis has them, and the script moves them to the one that is
    seen."""
    page, axes = "", set[str]()
    for picture, looks in pictures.items():
        axis = looks[0].partition(" ")[0] if looks else ""
        drawing = picture.without_columns() if axis in axes else picture
        hidden = ' hidden=""' if axes else ""
        page += f'<div data-looks="{"|".join(looks)}"{hidden}>{drawing.svg}<div class="read"></div></div>'
        axes.add(axis)
    return page


def _by_host(reader: RunReader, chart: Chart) -> Chart:
    """For many ranks on a few hosts, the median of each host instead, and the rank that stands out where there is room
    for another line."""
    hosts = by_host(reader.ranks.values())
    if len(chart.series) <= Palette.MOST_LINES or not 1 < len(hosts) <= Palette.MOST_LINES:
        return chart
    names, lines = [*map(plain, hosts)], list[Line]()
    for histories in hosts.values():
        own = {h.rank: chart.series[h.rank] for h in histories if h.rank in chart.series}
        lines.append(Points(ranges(columns(own))))
    grid = columns(chart.series)
    if len(lines) < Palette.MOST_LINES and (rank := outlier(grid, ranges(grid))) is not None:
        names.append(chart.label(rank))
        lines.append(chart.series[rank])
    note = " · ".join(filter(None, [chart.note, "median of each host"]))
    return replace(chart, series=dict(enumerate(lines)), thin={}, note=note, label=names.__getitem__)


def memory_held(reader: RunReader) -> str:
    """Memory of each rank by what holds it. On a CPU the resident set says nothing about tensors, so only parameters,
    gradients and optimizer state are shown; on a GPU also the rest at the peak."""
    rows = []
    for history in reader.ranks.values():
        held = {name: int(size) for name in CATEGORIES if (size := history.held.get(name)) is not None}
        if held and history.memory_name == "allocated":
            held["activations"] = max(0, int(history.memory_peak) - sum(held.values()))
        if held:
            rows.append(Bar(f"rank {history.rank}", held, source="measured"))
    limits = [h.memory_limit for h in reader.ranks.values() if h.memory_limit]
    if not rows:
        return ""
    memory = {f"rank {h.rank}": each for h in reader.ranks.values() if (each := host_memory(reader, h))}
    hosts = "; ".join(f"{rank} {each}" for rank, each in [*memory.items()][:64])
    below = f"<p>Host memory, with the workers of DataLoaders (PSS, peak): {hosts}</p>" if hosts else ""
    stacked = Bars(rows[:64], min(limits, default=None), "limit")
    return f"<h3>Memory per rank</h3>{drawn(stacked)}{below}"
