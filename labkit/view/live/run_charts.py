"""Draws the charts of a run: loss, throughput, step time, memory, and every scalar that the script reports."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from labkit import words
from labkit.charts import Chart, Line, Palette, drawn
from labkit.metric_names import Better, is_evaluated, parted
from labkit.record import RankHistory, RunReader
from labkit.series import Series
from labkit.witness import Findings

AXES = ("time", "step", "samples")
SCALES = {"automatic": None, "linear": False, "logarithmic": True}
SIZES = {"small": 2, "large": 1}  # charts in a row
MOST_SCALARS = 12
BEST: dict[Better | None, str] = {"lower": "lowest", "higher": "highest", None: ""}  # points, by what is better
SLOW_FIRST = 2.0  # times the slowest of all other steps: it compiled, or loaded what it needed


@dataclass(frozen=True)
class Look:
    """How charts are drawn: over which of AXES, on which of SCALES, which share of the value before an exponential
    moving average keeps (0: none), only the chart with this title (empty: all), and how many in a row."""

    axis: str = "time"
    scale: str = "automatic"
    smoothing: float = 0.0
    only: str = ""
    columns: int = 2


@dataclass(frozen=True)
class _Shown:
    """A line as it is shown: smoothed, and over the chosen axis."""

    line: Line
    smoothing: float
    place: Callable[[float], float]

    def points(self) -> list[tuple[float, float, float, float]]:
        shown, mean = [], None
        for x, low, high, last in self.line.points():
            mean = last if mean is None else self.smoothing * mean + (1 - self.smoothing) * last
            shown.append((self.place(x), low, high, mean))
        return shown


def charts_svg(reader: RunReader, look: Look, stall: tuple[float, float] | None = None) -> str:
    """The run's charts as one SVG. `stall`: from when to when no rank made progress, in seconds since the launch."""
    charts = run_charts(reader, look, stall)
    if look.only in (names := [chart.title for chart in charts]):
        charts = [charts[names.index(look.only)]]
    return drawn(charts, look.columns)


def titles(reader: RunReader) -> list[str]:
    """The titles of all charts that the run has."""
    return [chart.title for chart in run_charts(reader, Look())]


def run_charts(reader: RunReader, look: Look, stall: tuple[float, float] | None = None) -> list[Chart]:
    """The charts of every run, and one of each scalar that the script reported more than once."""
    histories = list(reader.ranks.values())
    reporting = reader.reporting
    places = {history.rank: _place(reader, history, look.axis) for history in reporting}
    first = places[reporting[0].rank] if reporting else float

    def shown(rank: int, line: Line, smoothed: bool = False) -> Line:
        if look.axis == "time" and not (smoothed and look.smoothing):
            return line
        return _Shown(line, look.smoothing if smoothed else 0.0, places[rank])

    def of(name: str) -> dict[int, Line]:
        return {rank: shown(rank, line, name == "loss") for rank, line in reader.lines(name).items()}

    directions = reader.folder.directions()
    marks: dict[str, Any] = {"restarts": tuple(map(first, reader.restarts)), "over": look.axis}
    marks["stall"] = stall if look.axis == "time" else None
    rate = "samples/s"
    if reader.folds:
        rate += " · lines: median and range"
        marks["label"] = f"median and range of {reader.folds.world_size:,} ranks".format
    saved = tuple(map(first, reporting[0].saved)) if reporting else ()
    changes = tuple((first(x), text) for x, text in [*reader.changes, *_found(reader)])
    scale = SCALES[look.scale]
    peak = max((history.memory_peak for history in histories), default=0.0)
    limit = min((h.memory_limit for h in histories if h.memory_limit), default=None)
    reserved = len(reader.lines("memory")) <= Palette.MOST_LINES and any(
        "reserved" in history.latest for history in histories
    )
    held = histories[0].memory_name if histories else "allocated"

    def scalar(title: str, trained: str, evaluated: str, series: dict[int, Line], note: str) -> Chart:
        teller = next((h for h in reporting if evaluated and _is_curve(h, evaluated)), None)
        notes = [note] if note else []
        notes += [f"thick: {evaluated}"] if teller and series else [evaluated] if teller else []
        if not series and trained:
            tellers = [h for h in reporting if _is_curve(h, trained)]
            if len({_extremes(h.scalars[trained]) for h in tellers}) == 1 < len(tellers):
                del tellers[1:]  # reduced over the ranks
                notes.append("the same on all ranks")
            series = {h.rank: shown(h.rank, h.scalars[trained], smoothed=True) for h in tellers}
        return Chart(
            title,
            series,
            words.quantity,
            changes=changes,
            saved=saved if title == "loss" else (),
            note=" · ".join(notes),
            evaluated=shown(teller.rank, teller.scalars[evaluated]) if teller else None,
            evaluated_name=evaluated,
            best=BEST[directions.better(evaluated)] if teller else "",
            from_zero=False,
            log=scale,
            **(marks if title == "loss" else marks | {"label": Chart.label}),
        )

    pairs = _pairs(reporting)
    _, evaluated_loss = pairs.pop("loss", ("", ""))
    memory = Chart(
        "memory per rank",
        of("memory"),
        words.gib,
        unit=2**30 if peak >= 2**30 else 2**20,
        limit=limit,
        levels={peak: ""} if peak else {},
        thin=of("reserved") if reserved else {},
        thin_name="reserved",
        note=f"{held} · dotted: peak",
        **marks,
    )
    throughput = Chart("throughput per rank", of("throughput"), words.quantity, note=rate, **marks)
    counts = any(line.points() for line in throughput.series.values())
    times, first_step = _without_a_slow_first(of("step_seconds"))
    notes = [words.skew(reader), f"↑ first: {words.seconds(first_step)}" if first_step else ""]
    return [
        scalar("loss", "", evaluated_loss, of("loss"), words.loss_of(reader)),
        # no chart if the script's batches cannot be counted
        *([throughput] if counts or not any(history.step for history in histories) else []),
        Chart("step time", times, words.seconds, note=" · ".join(filter(None, notes)), **marks),
        memory,
        *(scalar(title, *names, {}, "") for title, names in list(pairs.items())[:MOST_SCALARS]),
    ]


def _found(reader: RunReader) -> list[tuple[float, str]]:
    """When the training went wrong, in seconds since the launch, and how in a word."""
    steps = reader.reporting[0].series["step"].points() if reader.reporting else []
    found = []
    for finding in Findings.read(reader.attempt):
        if finding.since and (x := next((x for x, *_, step in steps if step >= finding.since), None)) is not None:
            found.append((x, f"✗ {finding.kind}"))
    return found


def _without_a_slow_first(lines: dict[int, Line]) -> tuple[dict[int, Line], float | None]:
    """The lines without their first point, and its highest value, if that would flatten all that follows."""
    points = [line.points() for line in lines.values()]
    if not points or any(len(each) < 3 for each in points):
        return lines, None
    first = max(each[0][2] for each in points)
    if first < SLOW_FIRST * max(max(high for _, _, high, _ in each[1:]) for each in points):
        return lines, None
    return {rank: _AfterFirst(line) for rank, line in lines.items()}, first


@dataclass(frozen=True)
class _AfterFirst:
    line: Line

    def points(self) -> list[tuple[float, float, float, float]]:
        return self.line.points()[1:]


def curves(reader: RunReader) -> dict[str, Line]:
    """The loss (the mean over the ranks) and every evaluated metric, over steps, by title."""
    histories = reader.reporting
    if not histories:
        return {}
    place = _place(reader, histories[0], "step")
    lines: dict[str, Line] = {"loss": _Shown(_Mean([*reader.lines("loss").values()]), 0.0, place)}
    for _, name in _pairs(histories).values():
        if teller := next((h for h in histories if name and _is_curve(h, name)), None):
            lines[name] = _Shown(teller.scalars[name], 0.0, _place(reader, teller, "step"))
    return {title: line for title, line in lines.items() if line.points()}


@dataclass(frozen=True)
class _Mean:
    """The mean of lines whose points have about the same x."""

    lines: Sequence[Line]

    def points(self) -> list[tuple[float, float, float, float]]:
        every = zip(*(points for line in self.lines if (points := line.points())), strict=False)
        means = ((each[0][0], sum(point[3] for point in each) / len(each)) for each in every)
        return [(x, mean, mean, mean) for x, mean in means]


def _pairs(histories: Iterable[RankHistory]) -> dict[str, tuple[str, str]]:
    """The names of a metric while training, and on other data, by title of a chart; either may be empty."""
    pairs: dict[str, tuple[str, str]] = {}
    for name in dict.fromkeys(name for h in histories for name in h.scalars if _is_curve(h, name)):
        if name.startswith("best_"):  # marked in the chart of the metric
            continue
        title = parted(name)[1]
        trained, evaluated = pairs.get(title, ("", ""))
        pairs[title] = (trained, name) if is_evaluated(name) else (name, evaluated)
    return pairs


def _is_curve(history: RankHistory, name: str) -> bool:
    return name in history.scalars and len(history.scalars[name].last) > 1


def _extremes(series: Series) -> tuple[float, float, float]:
    return series.lowest, series.highest, series.last[-1]


def _place(reader: RunReader, history: RankHistory, axis: str) -> Callable[[float], float]:
    """A function from seconds since the launch to a value of the axis, along a rank's steps."""
    if axis == "time":
        return float
    steps = history.series["step"].points()
    times, numbers = [x for x, *_ in steps], [float(last) for *_, last in steps]
    samples = words.together(reader, reader.samples())
    per_step = (samples or 0.0) / (history.totals["counted_steps"] or 1.0) if axis == "samples" else 1.0

    def place(x: float) -> float:
        # A report's bin may begin a little before that of its step; a validation belongs to the step before it.
        completed = bisect_right(times, x + history.series["step"].width)
        return numbers[max(0, completed - 1)] * per_step if numbers else 0.0

    return place
