"""Lists many runs in one table: the options in which they differ, how their loss fell, their best values."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from textwrap import shorten
from typing import Any, SupportsIndex, TypeVar, overload

from labkit import words
from labkit.arguments import ZeroOrMore, checked
from labkit.charts import as_image, spark_svg, spark_text
from labkit.errors import LabError, did_you_mean
from labkit.files import Json, finite
from labkit.metric_names import Better, Directions, agreed, parted
from labkit.record import Glance, Manifest, RunFolder, State
from labkit.text import escaped, plain, with_code
from labkit.view.live.page import state_pill
from labkit.view.tables import GAP, WIDEST

T = TypeVar("T")
SortKeys = dict[str, tuple[int, float | str]]

KILLED = "its launch was killed before the run started; labkit runs --clean deletes the folder"
SHOWN = 50
OWN_KEYS = ("started", "duration", "ranks")  # of every run
PARAMETERS, METRICS = 6, 3  # columns
CURVE, CURVE_WIDTH = "loss so far", 15  # in characters
WORD_ENDS = re.compile(r"[\s_/-]")  # at which a cell wraps
LONGEST_NAME = 40
CELL = "border:0;padding:1px 12px 1px 0"
ROW = '<tr style="background:none">'
TABLE = (
    '<table style="border-collapse:collapse;margin:6px 0;text-align:right;font-size:12px;'
    'font-variant-numeric:tabular-nums">'
)
HEAD = "vertical-align:bottom;font-weight:500;opacity:.7"


def sort_keys(state: State, ranks: int, seen: Glance, parameters: Mapping[str, Any], better: Better | None) -> SortKeys:
    """What a run can be sorted by. Ascending keys put the newest start, the shortest duration, the lowest parameter and
    the best value of the metric first whose `better` values are these."""
    keys: SortKeys = {"started": (0, -state.started), "duration": (0, state.seconds), "ranks": (0, ranks)}
    for name, value in parameters.items():
        keys.setdefault(name, _parameter_key(str(value)))
    for name, key in _metric_keys(seen, better).items():
        keys.setdefault(name, key)
    return keys


def _metric_keys(seen: Glance, better: Better | None) -> SortKeys:
    sign = -1.0 if better == "higher" else 1.0
    values = {name: finite(seen.value(name, better)) for name in seen.names}
    return {name: (0, sign * value) for name, value in values.items() if value is not None}


def order_in_words(name: str, better: Better | None) -> str:
    """How the runs are sorted by a metric if it is unknown which values are better; empty if it is known."""
    unknown = f"sorted by {name}, lowest first: run.metric({name!r}, better=…) says which values are better"
    return plain(unknown) if better is None else ""


def _parameter_key(text: str) -> tuple[int, float | str]:
    """A sort key that puts numbers before text."""
    try:
        number = finite(float(text))
    except ValueError:
        number = None
    return (1, text) if number is None else (0, number)


def sorted_by(name: str, runs: Sequence[T], keys: Sequence[SortKeys]) -> list[T]:
    """The runs by one of their `keys`, those without it last. Raises LabError if none has it."""
    known = dict.fromkeys(each for run_keys in keys for each in run_keys)
    if runs and name not in known:
        raise LabError(f"cannot sort by {name!r}{did_you_mean(name, known)}")
    order = sorted(range(len(runs)), key=lambda i: (name not in keys[i], keys[i].get(name)))
    return [runs[i] for i in order]


class RunList(list[Any]):
    """Runs, newest first, displayed as a table of the first 50; a slice is a RunList too. `unfinished` are the folders
    of launches that were killed. `by` is the sort key, which gets a column, and `order` says how it sorts if the first
    runs need not be the best. `empty` is displayed instead of an empty table."""

    def __init__(
        self,
        runs: Iterable[Any],
        unfinished: Sequence[Path] = (),
        *,
        by: str = "",
        order: str = "",
        empty: str = "no runs",
    ):
        super().__init__(runs)
        self.unfinished, self.by, self.order, self.empty = unfinished, by, order, empty

    @overload
    def __getitem__(self, which: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, which: slice) -> RunList: ...
    def __getitem__(self, which: Any) -> Any:
        chosen = super().__getitem__(which)
        return RunList(chosen, by=self.by, order=self.order) if isinstance(which, slice) else chosen

    @checked()
    def rm(self, *, keep: ZeroOrMore = 0) -> list[str]:
        """Delete the folders of these runs, with logs and checkpoints. Active runs are kept, and so are the first
        `keep` of the others: the newest, or the best of a sorted list. Returns the ids of the deleted runs.
        Raises LabError for `keep` if it is unknown which are the best."""
        deleted = self.but(keep)
        for run in deleted:
            run.rm()
        return [run.id for run in deleted]

    def facts(self) -> list[dict[str, Json]]:
        """`Run.to_dict()` of each run, as `labkit runs --json` prints them. All records are read, so take a slice of a
        long list: `labkit.runs()[:3].facts()`."""
        return [run.to_dict() for run in self]

    def but(self, keep: int) -> list[Any]:
        """The runs that `rm` deletes."""
        if keep and self.order:
            raise LabError(f"the best runs are unknown ({self.order}), so keep={keep} might delete them")
        return [run for run in self if run.is_over][keep:]

    @checked()
    def sorted(self, name: str) -> RunList:
        """The runs sorted by `name` (see `labkit.runs`). Raises LabError if no run has it."""
        manifests = [run.folder.glimpsed_manifest() for run in self]
        is_metric = name not in OWN_KEYS and not any(name in m.parameters for m in manifests)
        better = agreed([run.folder.directions() for run in self], name) if is_metric else None
        keys = [_metric_keys(Glance.read(run.folder, only=name), better) for run in self] if is_metric else []
        if not any(name in each for each in keys):  # not a metric, or refused below, with all names
            glances = [Glance.read(run.folder) if is_metric else Glance() for run in self]
            keys = [
                sort_keys(run.status(), m.world_size, seen, m.parameters, better)
                for run, m, seen in zip(self, manifests, glances, strict=True)
            ]
        order = order_in_words(name, better) if is_metric else ""
        return RunList(sorted_by(name, self, keys), self.unfinished, by=name, order=order, empty=self.empty)

    def _rows(self) -> tuple[list[dict[str, str | Glance]], list[str]]:
        """One row per shown run, all with the same columns; and the names of the columns of metrics and options, the
        most important first."""
        shown = [(run, run.folder.glimpsed_manifest(), run.status(), Glance.read(run.folder)) for run in self[:SHOWN]]
        options = [manifest.parameters for _, manifest, _, _ in shown]
        parameters = differing(options, self.by, len(set().union(*options)))
        directions = [run.folder.directions() for run, *_ in shown]
        metrics = metric_columns([seen for *_, seen in shown], directions, self.by)
        tagged = any(run.tags or run.note for run, *_ in shown)
        rows = [
            {
                "run": run.id,
                "started": time.strftime("%b %d %H:%M", time.localtime(state.started)).replace(
                    " ", "\N{NO-BREAK SPACE}", 1
                ),
                "state": _State(state, seen.loss),
                "loss": words.quantity(seen.loss, 4),
                CURVE: seen,
                **{title: words.quantity(seen.value(name, better), 4) for name, (title, better) in metrics.items()},
                **{name: _Value(plain(str(manifest.parameters.get(name, "")))) for name in parameters},
                "ranks": words.ranks(manifest.world_size, state.ranks),
                "duration": words.seconds(state.seconds),
                **({"tags": ", ".join(run.tags), "note": run.note} if tagged else {}),
                "sweep": _sweep_of(manifest),
                "why": _sentence(state),
            }
            for run, manifest, state, seen in shown
        ]
        killed = {"state": _State(State("lost", 0.0, ended=0.0), None), "why": KILLED}
        by_turns = [
            name
            for pair in zip_longest((title for title, _ in metrics.values()), parameters)
            for name in pair
            if name is not None
        ]
        differ = len({row["ranks"] for row in rows}) > 1
        optional = ["ranks", *by_turns] if differ else [*by_turns, "ranks"]
        return [*rows, *({"run": path.name, **killed} for path in self.unfinished)], optional

    def _left_out(self, columns: Sequence[str]) -> list[str]:
        """What the table does not show."""
        more, call = len(self) - SHOWN, f"runs(sort={self.by!r})" if self.by else "runs()"
        runs = [f"and {more:,} more: {call}[{SHOWN}:]"] if more > 0 else []
        return [*filter(None, [self.order]), *runs] + (
            [f"columns left out: {', '.join(columns)}; labkit.compare shows them"] if columns else []
        )

    def __repr__(self) -> str:
        rows, optional = self._rows()
        if not rows:
            return self.empty
        left_out = optional[METRICS + PARAMETERS :]
        columns = [name for name in _columns(rows) if name not in ("started", *left_out)]  # the ids say it
        texts = [columns, *([_text(row.get(name, "")) for name in columns] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in texts]
        return "\n".join([*lines, *self._left_out(left_out)])

    def _repr_html_(self) -> str:
        rows, optional = self._rows()
        if not rows:
            return self.empty
        rows = [row | {"run": str(row["run"]).partition("-")[2]} for row in rows]  # enough to attach to it
        names = [name for name in _columns(rows) if name not in ("note", "why")]  # these are below the row
        columns = _fitting(rows, names, optional)
        cell = f"{CELL};text-align:left;vertical-align:middle"
        head = "".join(f'<th style="{cell};{HEAD}">{_wrapping(name)}</th>' for name in columns)
        body = ""
        for row, run in zip_longest(rows, self[:SHOWN]):
            cells = "".join(f'<td style="{cell}">{_html(row.get(name, ""))}</td>' for name in columns)
            body += f"{ROW}{cells}</tr>"
            below = [with_code(str(row[name])) for name in ("note", "why") if row.get(name)]
            if run is not None and isinstance(state := row["state"], _State):
                below += _links(run.folder, state)
            if below:
                wide = f'colspan="{len(columns) - 1}" style="{cell};opacity:.75"'
                body += f"{ROW}<td></td><td {wide}>{' · '.join(below)}</td></tr>"
        left_out = self._left_out([name for name in names if name not in columns])
        text = "".join(f'<div style="font-size:12px;opacity:.75">{escaped(line)}</div>' for line in left_out)
        return as_image(f'<div style="overflow-x:auto">{TABLE}{ROW}{head}</tr>{body}</table></div>') + text


def _fitting(rows: Sequence[Mapping[str, Any]], names: Sequence[str], optional: Sequence[str]) -> list[str]:
    """The columns that fit side by side when their words wrap, with as many optional ones as possible."""

    def width(name: str) -> int:
        if name == CURVE:
            return GAP + CURVE_WIDTH
        text = " ".join([name, *(_text(row.get(name, "")) for row in rows)])
        return GAP + max(map(len, WORD_ENDS.split(text)))

    fitting = [name for name in names if name not in optional]
    for name in optional:
        if sum(map(width, [*fitting, name])) <= WIDEST:
            fitting.append(name)
    return [name for name in names if name in fitting]


def _in_any(name: str, mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name] if any(name in each for each in mappings) else []


def metric_columns(
    glances: Sequence[Glance], directions: Sequence[Directions], by: str, most: int = METRICS
) -> dict[str, tuple[str, Better | None]]:
    """The titles of the metrics that have a column, and which values are better, by name: first the metric that sorts
    the runs, then the evaluated ones, then those that are not also evaluated."""
    evaluated = dict.fromkeys(name for glance in glances for name in glance.extremes)
    metrics = {parted(name)[1] for name in evaluated}
    others = (name for glance in glances for name in glance.newest if parted(name)[1] not in metrics)
    names = dict.fromkeys([*_in_any(by, [glance.newest for glance in glances]), *evaluated, *others])
    columns = {}
    for name in [*names][:most]:
        title, better = plain(" ".join(name.split()))[:LONGEST_NAME], agreed(directions, name)
        columns[name] = (f"best {title}" if better and name in evaluated else title, better)
    return columns


def _columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The names of all columns that hold anything."""
    return [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) for row in rows)]


def differing(parameters: Sequence[Mapping[str, Any]], by: str = "", most: int = PARAMETERS) -> list[str]:
    """The options that the runs do not have in common, at most `most`, first the one that they are sorted by."""
    names = dict.fromkeys([*_in_any(by, parameters), *(name for each in parameters for name in each)])
    return [name for name in names if name == by or len({str(each.get(name)) for each in parameters}) > 1][:most]


class _State(str):
    """The state of a run in words; `html` also has its mark and its colour."""

    def __new__(cls, state: State, loss: float | None) -> _State:
        self = super().__new__(cls, words.status(state, loss))
        self.html, self.ended_badly = state_pill(state, loss), state.state in ("failed", "lost")
        return self

    html: str
    ended_badly: bool


def _links(folder: RunFolder, state: _State) -> list[str]:
    """A link to a run's report, or if it ended badly how to write one, and its folder. A notebook's links are relative
    to its own folder, in which its kernel works."""
    if folder.report.exists():
        links = [f'<a href="{escaped(os.path.relpath(folder.report))}" target="_blank">report</a>']
    elif state.ended_badly:
        name = escaped(repr(folder.id.partition("-")[2]))
        links = [f"<code>labkit.attach({name}).report()</code> writes a report"]
    else:
        return []
    return [*links, f"<code>{escaped(os.path.relpath(folder.path))}</code>"]


class _Value(str):
    """The value of an option, which is shown in at most 24 characters."""


def _text(value: str | Glance) -> str:
    if isinstance(value, Glance):
        return spark_text(value.losses)
    return words.parameter_text(value) if isinstance(value, _Value) else plain(value)


def _html(value: str | Glance) -> str:
    if isinstance(value, Glance):
        return spark_svg(value.losses)
    if isinstance(value, _State):
        return value.html
    shown = _wrapping(_text(value))
    return shown if _text(value) == value else f'<span title="{escaped(value)}">{shown}</span>'


def _wrapping(text: str) -> str:
    """HTML that breaks after underscores and slashes, too, but not between a number and its unit."""
    text = re.sub(r"(\d) (?=[a-z])", "\\1\N{NO-BREAK SPACE}", text)  # 28 s
    return escaped(text).replace("_", "_<wbr>").replace("/", "/<wbr>")


def _sweep_of(manifest: Manifest) -> str:
    """`ddp-3f2a, point 3`, if the run is one of a sweep."""
    mark = manifest.sweep
    return plain(f"{mark.id.partition('-')[2]}, point {mark.point}") if mark else ""


def _sentence(state: State) -> str:
    """The first line of why the run ended or what it waits for; some explanations are long."""
    sentence = state.cause.sentence if state.cause else state.notice or ""
    return shorten(plain(sentence.partition("\n")[0]), 120, placeholder=" …")
