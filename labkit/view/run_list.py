"""Many runs as one table: what they differ in, how their loss fell, their best values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, SupportsIndex, overload

from labkit.record import State
from labkit.record.measured.glance import Glance, glance
from labkit.record.text import escaped, plain
from labkit.view import words
from labkit.view.charts.images import as_image
from labkit.view.charts.spark import spark_svg, spark_text

__all__ = ["RunList", "differing"]

KILLED = "its launch was killed before the run started; labkit runs --clean deletes the folder"
SHOWN = 50
PARAMETERS, METRICS = 6, 3  # columns
LONGEST_VALUE = 24


class RunList(list[Any]):
    """Runs, newest first; displays as a table of the newest 50, and a slice is a RunList, too. `unfinished` are the
    folders of launches that were killed."""

    def __init__(self, runs: Iterable[Any], unfinished: Sequence[Path] = ()):
        super().__init__(runs)
        self.unfinished = unfinished

    @overload
    def __getitem__(self, which: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, which: slice) -> RunList: ...
    def __getitem__(self, which: Any) -> Any:
        chosen = super().__getitem__(which)
        return RunList(chosen) if isinstance(which, slice) else chosen

    def rm(self, *, keep: int = 0) -> list[str]:
        """Delete the folders of these runs, with logs and checkpoints, except those that are active and the newest
        `keep` of the others. Returns the ids of the deleted runs."""
        ended = [run for run in self if run.status().is_final][keep:]
        for run in ended:
            run.rm()
        return [run.id for run in ended]

    def _rows(self) -> list[dict[str, str | Glance]]:
        """One row per shown run, all with the same columns."""
        shown = [(run, run.folder.glimpsed_manifest(), run.status(), glance(run.folder)) for run in self[:SHOWN]]
        parameters = differing([manifest["parameters"] for _, manifest, _, _ in shown])
        metrics = list(dict.fromkeys(name for *_, seen in shown for name in seen.best))[:METRICS]
        tagged = any(run.tags or run.note for run, *_ in shown)
        rows = [
            {
                "run": run.id,
                "state": state.state,
                "loss": words.quantity(seen.losses[-1] if seen.losses else None, 4),
                "loss so far": seen,
                **{f"best {name}": words.quantity(seen.best.get(name), 4) for name in metrics},
                **{name: str(manifest["parameters"].get(name, ""))[:LONGEST_VALUE] for name in parameters},
                "ranks": words.ranks(manifest["world_size"], state.ranks),
                "time": words.seconds(state.seconds),
                **({"tags": ", ".join(run.tags), "note": run.note} if tagged else {}),
                "why": _sentence(state) or _sweep_of(manifest),
            }
            for run, manifest, state, seen in shown
        ]
        killed = {"state": "lost", "time": "n/a", "why": KILLED}
        return [*rows, *({"run": path.name, **killed} for path in self.unfinished)]

    def _left_out(self) -> str:
        return f"and {len(self) - SHOWN:,} older runs: runs()[{SHOWN}:]" if len(self) > SHOWN else ""

    def __repr__(self) -> str:
        if not (rows := self._rows()):
            return "no runs yet"
        columns = _columns(rows)
        texts = [columns, *([_text(row.get(name, "")) for name in columns] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in texts]
        return "\n".join([*lines, *filter(None, [self._left_out()])])

    def _repr_html_(self) -> str:
        if not (rows := self._rows()):
            return "no runs yet"
        cell = 'style="text-align:left;padding:2px 8px;vertical-align:middle"'
        wide = f'{cell[:-1]};min-width:16em"'  # a row is not to be as high as its sentence is long
        columns = _columns(rows)
        head = "".join(f"<th {cell}>{escaped(name)}</th>" for name in columns)
        body = "".join(
            "<tr>"
            + "".join(f"<td {wide if name == 'why' else cell}>{_html(row.get(name, ''))}</td>" for name in columns)
            + "</tr>"
            for row in rows
        )
        left_out = f"<div>{escaped(self._left_out())}</div>" if self._left_out() else ""
        return f"{as_image(f'<table><tr>{head}</tr>{body}</table>')}{left_out}"


def _columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The names of all columns that hold anything."""
    return [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) for row in rows)]


def differing(parameters: Sequence[dict[str, Any]]) -> list[str]:
    """The options that the runs do not have in common."""
    names = dict.fromkeys(name for each in parameters for name in each)
    return [name for name in names if len({str(each.get(name)) for each in parameters}) > 1][:PARAMETERS]


def _text(value: str | Glance) -> str:
    return spark_text(value.losses) if isinstance(value, Glance) else plain(value)


def _html(value: str | Glance) -> str:
    return spark_svg(value.losses) if isinstance(value, Glance) else escaped(value)


def _sweep_of(manifest: dict[str, Any]) -> str:
    """`point 3 of the sweep …`, if the run is one of a sweep."""
    mark = manifest.get("sweep")
    return plain(f"point {mark.get('point')} of the sweep {mark.get('id')}") if isinstance(mark, dict) else ""


def _sentence(state: State) -> str:
    """The first line of why the run ended or what it waits for; some explanations are long."""
    sentence = str((state.cause or {}).get("sentence", "")) or state.notice or ""
    return plain(sentence.partition("\n")[0])[:120]
