"""Compares runs in one table, computed from their folders alone."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, variance
from typing import TYPE_CHECKING, Any

from labkit import words
from labkit.arguments import checked
from labkit.charts import Bar, Bars, Chart, Line, Palette, as_image, dot, drawn
from labkit.dataclass_json import to_json
from labkit.errors import LabError, did_you_mean
from labkit.files import Json, finite, number
from labkit.metric_names import Better, Directions, agreed, is_evaluated
from labkit.record import Glance, Manifest, RankHistory, RunFolder, RunReader, State
from labkit.stored_runs import find_run
from labkit.text import plain, slug, with_code
from labkit.view.gate import (
    LEAST_RECORDS,
    PEAK_MEMORY,
    STEP_TIME,
    STUDENTS_T,
    SYNTAX,
    Condition,
    Gate,
    Samples,
    decide,
    step_time,
)
from labkit.view.live.disturbances import disturbances
from labkit.view.live.run_charts import curves
from labkit.view.run_facts import glance_at, is_tested
from labkit.view.run_list import OWN_KEYS, SortKeys, differing, metric_columns, order_in_words, sort_keys, sorted_by
from labkit.view.tables import grid

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

FIGURES = {"training_seconds": "training time", "throughput": "mean samples/s", "memory_peak": "peak memory"}
SPEEDS = ("training_seconds", "throughput")
SEED = re.compile(r"--seed[=\n][^\n]*\n?")
REPEAT = "repeat"
REPEATS = "repeat: the same script, arguments and kind of machine as the first run, so that the ratio is noise"
UNTABLED = ("recipe", "parameters_given", "result", "doubtful", "disturbances", "other_load")  # of a summary
IN_JSON = (
    *("run", "name", "script", "ranks", "nodes", "state", "result", "wrong", "notice", "training_seconds"),
    *("epoch_seconds", "samples", "throughput", "parameters", "held_bytes", "memory_peak", "memory_kind"),
    *("input_share", "communication_share"),
)
LITTLE_LOAD = 0.05  # of the cores; at 0.13, a script of two ranks on two cores took a third longer
LONGEST_NAME = 40
MOST_CURVES, MOST_PARAMETERS = 6, 12


@checked()
def compare(runs: Any, *, base: Any = (), sort: str | None = None) -> Comparison:
    """Compare runs, or their ids or folders, in one table; speed-ups are relative to the first, or those of `base`,
    which come before the others. `.gate("step_time > 5%")` decides whether they differ by more than a limit.

    `sort` is as for `labkit.runs`: a metric, best run first; a parameter; "duration", … `.table` is a DataFrame. Raises
    LabError if there is nothing to compare, or if no run has what `sort` names.
    """
    first, others = _folders(base), _folders(runs)
    if not others:
        raise LabError("there is no run to compare; pass a list of runs, or in a terminal their ids or --last 3")
    folders = [*first, *others]
    readers = [RunReader(folder, each_rank=True).read_all() for folder in folders]
    if sort is not None:
        better = agreed([folder.directions() for folder in folders], sort)
        readers = sorted_by(sort, readers, [_sort_keys(reader, better) for reader in readers])
    return Comparison(
        tuple(map(summary, readers)),
        tuple(reader.folder for reader in readers),
        tuple(map(curves, readers)),
        tuple(map(glance_at, readers)),
        tuple(reader.folder.directions() for reader in readers),
        sort or "",
        tuple(folder.path for folder in first or others[:1]),
    )


def _folders(runs: Any) -> list[RunFolder]:
    if isinstance(runs, str) or hasattr(runs, "folder"):
        runs = [runs]
    if not isinstance(runs, Sequence):
        raise LabError(f"compare takes a list of runs, for example compare([a, b]); got {type(runs).__name__}")
    return [run.folder if hasattr(run, "folder") else find_run(run) for run in runs]


def _sort_keys(reader: RunReader, better: Better | None) -> SortKeys:
    manifest, state = reader.folder.read_manifest(), State.read(reader.folder)
    return sort_keys(state, manifest.world_size, glance_at(reader), manifest.parameters, better)


def summary(reader: RunReader) -> dict[str, Any]:
    """One run's figures in seconds, bytes and samples/s over all ranks; None for what the run did not report."""
    folder, state = reader.folder, State.read(reader.folder)
    manifest, histories = folder.read_manifest(), list(reader.ranks.values())
    first = histories[0] if histories else None
    values = words.final_values(reader)
    stepping = [h.totals["seconds"] for h in histories if h.totals["seconds"]]
    loss = words.mean_latest(reader, "loss")
    samples = words.together(reader, [h.totals["samples"] for h in histories if h.totals["samples"]]) or 0.0
    return {
        "run": folder.id,
        "name": folder.id.partition("-")[2],
        "script": manifest.name,
        "ranks": manifest.world_size,
        "last_ranks": state.ranks,
        "nodes": _nodes(manifest),
        "recipe": _recipe(manifest, state),
        "parameters_given": {name: str(value) for name, value in manifest.parameters.items()},
        "state": state.state,
        "result": words.status(state, loss),
        "doubtful": words.is_doubtful(state, loss),
        "wrong": state.wrong,
        "disturbances": disturbances(reader, state),
        "other_load": max((host.conditions.others for host in reader.hosts.values()), default=0.0),
        "notice": state.notice,
        "training_seconds": number(values.get("training_seconds")) or (max(stepping) if stepping else None),
        "epoch_seconds": _epoch_seconds(first, values),
        "test_accuracy": None,
        **{name: figure for name in values if is_tested(name) and (figure := number(values[name])) is not None},
        "samples": samples,
        "throughput": words.mean_throughput(reader),
        "parameters": finite(values.get("parameters")),
        "held_bytes": max((size for h in histories if (size := h.held_bytes) is not None), default=None),
        "memory_peak": max((h.memory_peak for h in histories if h.memory_peak), default=None),
        "memory_kind": first.memory_name if first else None,
        "input_share": max(_shares(histories, "input"), default=None),
        "communication_share": min(_shares(histories, "communication"), default=None),  # the rest is waiting
    }


def _epoch_seconds(first: RankHistory | None, values: dict[str, Any]) -> float | None:
    """Seconds per epoch: the mean of the script's own reports, else derived from the whole training time."""
    reports = [v for r in (first.reports if first else ()) if (v := finite(r.get("epoch_seconds"))) is not None]
    if reports:
        return sum(reports) / len(reports)
    step, start, per_epoch = (finite(values.get(name)) for name in ("step", "start_step", "steps_per_epoch"))
    seconds, steps = finite(values.get("training_seconds")), (step or 0) - (start or 0)
    return seconds / steps * per_epoch if seconds and per_epoch and steps > 0 else None


def _shares(histories: list[RankHistory], phase: str) -> list[float]:
    return [share for h in histories if (share := words.share(h, phase)) is not None]


def _recipe(manifest: Manifest, state: State) -> str:
    """A text that is equal for repeats: same script text, arguments but the seed, numbers of ranks and of nodes, kinds
    of devices, threads and torch."""
    # the run's own checkpoint folder does not count
    arguments = [arg for arg in manifest.args if not manifest.id or manifest.id not in arg]
    arguments = SEED.sub("", "\n".join(arguments)).split("\n")
    ranks = [manifest.world_size, state.ranks, _nodes(manifest)]
    machine = [sorted(set(manifest.devices)), manifest.env.get("OMP_NUM_THREADS"), manifest.versions.get("torch")]
    return json.dumps([manifest.script.sha256, arguments, ranks, machine], default=str)


def _measured(name: str, value: float | None) -> str:
    return f"{value:.2%}" if name == "test_accuracy" and value is not None else words.quantity(value, 4)


def _nodes(manifest: Manifest) -> int:
    nodes = manifest.nodes
    return nodes.count if nodes else 1


def _speedup(base: dict[str, Any], other: dict[str, Any]) -> float | None:
    """The ratio of training times; None unless both runs succeeded on the same number of samples."""
    same = base["state"] == other["state"] == "succeeded" and base["samples"] == other["samples"]
    times = (base["training_seconds"], other["training_seconds"])
    return times[0] / times[1] if same and all(times) else None


def _doubts(base: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Why the ratio of two runs' times may not be that of what differs between them, each reason in a word or two."""
    if base is other:
        return []
    labels = [each.label for summary in (base, other) for each in summary["disturbances"]]
    return [*dict.fromkeys(([REPEAT] if base["recipe"] == other["recipe"] else []) + labels)]


def _marked_ratio(speedup: float | None, doubts: Sequence[str]) -> str:
    """`1.34x` · `1.34x (overlapped)` · n/a"""
    if speedup is None:
        return "n/a"
    return f"{speedup:.2f}x ({', '.join(doubts)})" if doubts else f"{speedup:.2f}x"


@dataclass(frozen=True)
class Comparison:
    """The summaries and curves of several runs. Displays overlaid curves, a table and bars in a notebook, and text in a
    terminal."""

    summaries: tuple[dict[str, Any], ...]
    folders: tuple[RunFolder, ...]
    curves: tuple[Mapping[str, Line], ...]
    glances: tuple[Glance, ...]
    directions: tuple[Directions, ...]
    sorted_by: str
    base: tuple[Path, ...]

    def gate(self, *conditions: str) -> Gate:
        """Whether the runs differ from those of the base (the first one, if `compare` was not told) by more than each
        condition allows: "step_time > 5%" (of the base's), "peak_memory > 1e9" (bytes), "val_accuracy < -0.01". Every
        metric in the table has its value there. `.passed` is False if one holds, None if the runs cannot tell, because
        the difference is within the noise of what was measured; repeat them then, and give all.

        Raises LabError for a condition that is not one, a run that did not succeed, and a value that a run lacks."""
        parsed = [Condition.parse(text) for text in conditions]
        is_base = [folder.path in self.base for folder in self.folders]
        if not parsed or all(is_base) or len({folder.path for folder in self.folders}) < len(self.folders):
            raise LabError(f"a gate takes {SYNTAX}, and other runs than those of the base, none of them twice")
        for folder, summary in zip(self.folders, self.summaries, strict=True):
            if summary["state"] != "succeeded" or summary["doubtful"]:
                raise LabError(f"{plain(folder.id)} {summary['result']}: a gate needs runs that succeeded")
        return Gate(
            decide(condition, *(self._samples(condition.name, is_base, each) for each in (True, False)))
            for condition in parsed
        )

    def _samples(self, name: str, is_base: Sequence[bool], wanted: bool) -> Samples:
        """The values of a quantity in the runs of the base, or in the others. Raises LabError if one has none."""
        chosen = [i for i, each in enumerate(is_base) if each == wanted]
        if name != STEP_TIME:
            is_rough = name == PEAK_MEMORY and any(self.summaries[i]["memory_kind"] != "allocated" for i in chosen)
            return Samples(tuple(self._known(name, i) for i in chosen), is_rough=is_rough)
        chosen = [i for i in chosen if not self._disturbed(i)] or chosen
        times = [step_time(self.folders[i]) for i in chosen]
        if None in times:
            few = plain(self.folders[chosen[times.index(None)]].id)
            raise LabError(
                f"{few} has fewer than {LEAST_RECORDS} records of steps on a rank after its warm-up, at most "
                "ten of which are made in a second: train for more steps"
            )
        values, noise = zip(*filter(None, times), strict=True)
        return Samples(values, noise, tuple(label for i in chosen for label in self._disturbed(i)))

    def _disturbed(self, run: int) -> list[str]:
        """What may have slowed a run down, in words; on CPUs, other programs do so before the table mentions them."""
        summary = self.summaries[run]
        loaded = summary["memory_kind"] != "allocated" and summary["other_load"] > LITTLE_LOAD
        return [each.label for each in summary["disturbances"]] or ["other load"] * loaded

    def _known(self, name: str, run: int) -> float:
        """A metric of a run as in the table, or its peak of memory, if it and the newest value are finite."""
        glance, peak = self.glances[run], self.summaries[run]["memory_peak"]
        value = newest = peak
        if name != PEAK_MEMORY:
            every = dict.fromkeys(each for glance in self.glances for each in glance.names)
            if name not in every:
                known = did_you_mean(name, [STEP_TIME, PEAK_MEMORY, *every])
                printed = f"if it is only printed, run.metric({name!r}, from_log=True) takes it from the log"
                raise LabError(f"no run has {name!r}{known}; {printed}")
            value = glance.value(name, self._better(name))
            newest = glance.newest.get(name, value)
        if finite(value) is None or finite(newest) is None:
            raise LabError(f"{plain(self.folders[run].id)} has no finite {name}, so that it cannot be compared")
        return float(value)

    def to_dict(self) -> dict[str, Json]:
        """The runs side by side for a program, as `labkit compare --json` prints them (docs/reference/json.md)."""
        runs = []
        for i, (s, glance) in enumerate(zip(self.summaries, self.glances, strict=True)):
            runs.append(
                {name: s[name] for name in IN_JSON}
                | {
                    "base": self.folders[i].path in self.base,
                    "options": s["parameters_given"],
                    "step_time": (step_time(self.folders[i]) or [None])[0],
                    "metrics": {name: glance.value(name, self._better(name)) for name in glance.names},
                    "speedup": self._speedups()[i],
                    "speedup_remarks": self._speedup_doubts()[i],
                    "disturbances": [each.sentence for each in s["disturbances"]],
                }
            )
        return {"schema": "labkit.compare/1", "runs": to_json(runs), "findings": to_json(self.findings)}

    @property
    def findings(self) -> list[str]:
        """Differences compared with the noise between repeats; empty if no run was repeated."""
        evaluated = [
            {name: glance.value(name, self._better(name)) for name in glance.extremes} for glance in self.glances
        ]
        return findings([s | values for s, values in zip(self.summaries, evaluated, strict=True)])

    def _better(self, name: str) -> Better | None:
        return agreed(self.directions, name)

    def figure(self) -> Figure:
        """The runs' losses, aligned by step and by time, as a plotly figure."""
        return runs_together({folder.id: RunReader(folder, each_rank=True).read_all() for folder in self.folders})

    def scaling(self) -> Figure:
        """Throughput over the number of ranks, one line per script, as a plotly figure. Runs that were restarted on
        fewer ranks are left out."""
        steady = [s for s in self.summaries if s["throughput"] and not s["last_ranks"]]
        return scaling([(s["script"], s["ranks"], s["throughput"]) for s in steady])

    @property
    def table(self) -> pd.DataFrame:
        """One row per run; `speedup` is the ratio of training times relative to the first run, if both processed the
        same number of samples, and `speedup_remark` why it may say nothing."""
        import pandas as pd

        # pandas with pyarrow accepts UTF-8 only, and a file name may be any bytes
        rows = [{k: plain(v) if isinstance(v, str) else v for k, v in each.items()} for each in self.summaries]
        table = pd.DataFrame(rows).drop(columns=[*UNTABLED])
        table.insert(6, "speedup", self._speedups())
        table.insert(7, "speedup_remark", [", ".join(doubts) for doubts in self._speedup_doubts()])
        return table

    def _speedups(self) -> list[float | None]:
        return [_speedup(self.summaries[0], summary) for summary in self.summaries]

    def _speedup_doubts(self) -> list[list[str]]:
        doubts = [_doubts(self.summaries[0], summary) for summary in self.summaries]
        return [[] if speedup is None else each for speedup, each in zip(self._speedups(), doubts, strict=True)]

    def _differing(self) -> list[str]:
        return differing([s["parameters_given"] for s in self.summaries], self.sorted_by, MOST_PARAMETERS)

    def _rows(self) -> list[dict[str, str]]:
        parameters = self._differing()
        columns = {"loss": self._marked("loss")}
        for name, (title, _) in metric_columns(self.glances, self.directions, self.sorted_by, MOST_CURVES).items():
            if not is_tested(name):
                columns[title] = self._marked(name)
        tested = dict.fromkeys(name for s in self.summaries for name in s if is_tested(name))
        results = {tested_name(name): self._marked(name) for name in tested}
        return [
            {
                "run": plain(s["name"]),
                **{name: words.parameter_text(s["parameters_given"].get(name, "")) for name in parameters},
                **{title: texts[i] for title, texts in columns.items()},
                "ranks": words.ranks(s["ranks"], s["last_ranks"])
                + (f" on {s['nodes']} nodes" if s["nodes"] > 1 else ""),
                "training time": words.seconds(s["training_seconds"]),
                "per epoch": words.seconds(s["epoch_seconds"]),
                **{title: texts[i] for title, texts in results.items()},
                "speed-up": _marked_ratio(speedup, doubts),
                "mean samples/s": words.quantity(s["throughput"]),
                "state held per rank": words.gib(s["held_bytes"]),
                f"peak {s['memory_kind'] or 'memory'} per rank": words.gib(s["memory_peak"]),
                "input wait": words.percent(s["input_share"]),
                "communication": words.percent(s["communication_share"]),
                "parameters": "n/a" if s["parameters"] is None else f"{s['parameters']:,.0f}",
                "result": s["result"],
            }
            for i, (s, speedup, doubts) in enumerate(
                zip(self.summaries, self._speedups(), self._speedup_doubts(), strict=True)
            )
        ]

    def _marked(self, name: str) -> list[str]:
        """A metric of each run as text, with ★ at the best evaluation of good runs, unless all look equal or it is
        unknown which values are better. The last training loss is that of other samples in each run."""
        better = self._better(name)
        values = [glance.value(name, better) for glance in self.glances]
        texts = [_measured(name, value) for value in values]
        if better is None or not is_evaluated(name):
            return texts
        known = {
            i: value
            for i, (summary, each) in enumerate(zip(self.summaries, values, strict=True))
            if summary["state"] not in ("failed", "lost")
            and not summary["wrong"]
            and not summary["doubtful"]
            and (value := finite(each)) is not None
        }
        pick = min if better == "lower" else max
        best = texts[pick(known, key=known.__getitem__)] if len({texts[i] for i in known}) > 1 else ""
        return [f"★ {text}" if i in known and text == best else text for i, text in enumerate(texts)]

    def __str__(self) -> str:
        rows, common = self._folded()
        names = list(dict.fromkeys(name for row in rows for name in row))
        grid = [names, *([row.get(name, "") for name in names] for row in rows)]
        widths = [max(len(line[i]) for line in grid) for i in range(len(names))]
        lines = ["  ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) for line in grid]
        return "\n".join([*lines, *common, *self._remarks()])

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        rows, common = self._folded()
        text = "".join(f'<div style="font-size:12px">{with_code(each)}</div>' for each in [*common, *self._remarks()])
        marks = [f"{dot(i)} " for i in range(len(rows))] if any(self.curves) else []
        html = f"{self._overlay()}{grid(rows, marks, transposes=True)}{text}{self._bars()}"
        return {"text/plain": str(self), "text/html": as_image(html)}

    def _folded(self) -> tuple[list[dict[str, str]], list[str]]:
        """The rows without what no run has and what all have in common, and a sentence with the latter."""
        rows = self._rows()
        names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "run"]
        parameters = self._differing()  # even where the texts, which are cut, are equal
        same = [name for name in names if name not in parameters and len({row.get(name) for row in rows}) == 1]
        common = {name: rows[0].get(name, "") for name in same}
        if len(rows) < 2:
            common = {name: text for name, text in common.items() if text in ("", "n/a")}
        rows = [{name: text for name, text in row.items() if name not in common} for row in rows]
        shared = ", ".join(f"{name} {text}" for name, text in common.items() if text not in ("", "n/a"))
        return rows, [f"the same in all runs: {shared}"] if shared else []

    def _overlay(self) -> str:
        """The loss and the evaluated metrics of the first Palette.MOST_LINES runs over each other, by step."""
        titles = list(dict.fromkeys(title for lines in self.curves for title in lines))[:MOST_CURVES]
        note = (
            f"the first {Palette.MOST_LINES} of {len(self.curves)} runs"
            if len(self.curves) > Palette.MOST_LINES
            else ""
        )
        charts = [
            Chart(
                title,
                {i: lines[title] for i, lines in enumerate(self.curves[: Palette.MOST_LINES]) if title in lines},
                words.quantity,
                note=note,
                from_zero=False,
                log=None,
                over="step",
                label=lambda i: slug(self.summaries[i]["name"]),
            )
            for title in titles
        ]
        return drawn(charts, most_lines=Palette.MOST_LINES * MOST_CURVES)

    def _remarks(self) -> list[str]:
        notices = [plain(f"{s['name']}: {s['notice']}") for s in self.summaries if s["notice"]]
        by, given = self.sorted_by, [s["parameters_given"] for s in self.summaries]
        is_metric = by not in ("", *OWN_KEYS) and not any(by in each for each in given)
        order = order_in_words(by, self._better(by)) if is_metric else ""
        machines = [
            f"{plain(s['name'])}: {'; '.join(each.sentence for each in s['disturbances'])}"
            for s in self.summaries
            if s["disturbances"]
        ]
        is_repeated = any(REPEAT in doubts for doubts in self._speedup_doubts())
        return [*filter(None, [order]), *notices, *machines, *([REPEATS] if is_repeated else []), *self.findings]

    def _bars(self) -> str:
        """Training time and state held per rank, each relative to the largest; and how a run ended that did not finish,
        because it did not train for long."""
        figures = [
            ("training time", "training_seconds", words.seconds),
            ("state held per rank", "held_bytes", words.gib),
        ]
        page = ""
        for title, key, show in figures:
            rows = []
            for s in self.summaries:
                note = s["result"] if s["state"] != "succeeded" else "" if s[key] else "n/a"
                rows.append(Bar(plain(s["name"]), {title: s[key]} if s[key] else None, note, "measured"))
            page += drawn(Bars(rows, show=show, title=title))
        return page


def runs_together(readers: Mapping[str, RunReader]) -> Figure:
    """The losses of several runs, aligned by step and by time, as a plotly figure."""
    from labkit.charts import figure

    found = [(name, reader, line) for name, reader in readers.items() if (line := curves(reader).get("loss"))]
    by_step = {i: line for i, (_, _, line) in enumerate(found)}
    by_time = {i: reader.ranks[min(reader.ranks)].series["loss"] for i, (_, reader, _) in enumerate(found)}
    charts = [
        Chart(
            f"loss by {over}",
            lines,
            words.quantity,
            note="loss",
            over=over,
            from_zero=False,
            label=lambda i: found[i][0],
            legend=True,
        )
        for over, lines in (("step", by_step), ("time", by_time))
    ]
    return figure(charts, "Runs side by side")


def scaling(points: Sequence[tuple[str, int, float]]) -> Figure:
    """Throughput over ranks from `(script, ranks, samples/s)`; the dotted line is linear scaling from the fewest."""
    from labkit.charts import figure

    curves: dict[str, list[tuple[float, float, float, float]]] = {}
    for name, ranks, rate in sorted(points, key=lambda point: point[1]):
        curves.setdefault(name, []).append((ranks, rate, rate, rate))
    return figure([Chart.over_ranks("Scaling", curves, "samples/s over all ranks")])


def findings(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence per group of repeats, relative to the first group; none if no run was repeated.

    Repeats are runs of the same script text, number of ranks and arguments, except the seed. The noise is the standard
    deviation within repeats, pooled over all groups of two or more. A difference of means is more than noise if it is
    outside the 95% confidence interval of Student's t.
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    for summary in summaries:
        if summary["state"] == "succeeded":
            groups.setdefault(summary["recipe"], []).append(summary)
    if len(groups) < 2 or all(len(group) < 2 for group in groups.values()):
        return []
    base, *others = groups.values()
    evaluated = dict.fromkeys(name for summary in summaries for name in summary if is_evaluated(name))
    figures = FIGURES | {name: tested_name(name) for name in evaluated if name != "test_samples"}
    parameters = [group[0].get("parameters_given", {}) for group in groups.values()]
    varied = [name for name in differing(parameters) if name != "seed"]
    sentences = []
    for other in others:
        differences: dict[bool, list[str]] = {True: [], False: []}
        for figure, label in figures.items():
            if difference := _difference(figure, base, other, groups.values()):
                is_significant, size = difference
                differences[is_significant].append(f"{label} {size}")
        parts = [("more than noise", differences[True]), ("within the noise", differences[False])]
        text = "; ".join(f"{verdict}: {', '.join(sizes)}" for verdict, sizes in parts if sizes)
        sentences += [f"{_name(other, varied)} vs. {_name(base, varied)}: {text}"] if text else []
    return sentences


def tested_name(name: str) -> str:
    """`test accuracy`"""
    return plain(" ".join(name.replace("_", " ").split()))[:LONGEST_NAME]


def _difference(
    figure: str, base: list[dict[str, Any]], other: list[dict[str, Any]], groups: Collection[list[dict[str, Any]]]
) -> tuple[bool, str] | None:
    """Whether the groups differ by more than noise, and `+19.8% (repeats differ by 1.4%)`; None if it is unknown."""
    repeated = [values for group in groups if len(values := _values(figure, group)) > 1]
    ours, theirs = _values(figure, base), _values(figure, other)
    degrees = sum(len(values) - 1 for values in repeated)
    if not degrees or not ours or not theirs or not mean(ours):
        return None
    noise = sqrt(sum(variance(values) * (len(values) - 1) for values in repeated) / degrees)
    change, error = mean(theirs) - mean(ours), noise * sqrt(1 / len(ours) + 1 / len(theirs))
    size = f"{change / mean(ours):+.1%} (repeats differ by {noise / abs(mean(ours)):.1%})"
    return abs(change) > STUDENTS_T[min(degrees, len(STUDENTS_T)) - 1] * error, size


def _values(figure: str, group: list[dict[str, Any]]) -> list[float]:
    """The speed of a run that something disturbed says nothing."""
    kept = [summary for summary in group if figure not in SPEEDS or not summary.get("disturbances")]
    return [value for summary in kept if (value := finite(summary.get(figure))) is not None]


def _name(group: list[dict[str, Any]], varied: Sequence[str]) -> str:
    """`ddp lr=0.1 on 2 ranks (3 runs)`"""
    first, runs = group[0], f"{len(group)} run{'s' * (len(group) > 1)}"
    parameters = first.get("parameters_given", {})
    settings = "".join(f" {name}={words.parameter_text(parameters[name])}" for name in varied if name in parameters)
    ranks = words.ranks(first["ranks"], first["last_ranks"])
    where = f"{ranks} rank{'s' * (ranks != '1')}" + (f" on {first['nodes']} nodes" if first["nodes"] > 1 else "")
    return f"{first['script']}{settings} on {where} ({runs})"
