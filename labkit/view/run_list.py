"""Many runs as one table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from labkit.record import RunFolder, State
from labkit.record.folder import read_json
from labkit.record.text import escaped, plain
from labkit.view import words

__all__ = ["RunList"]

KILLED = "its launch was killed before the run started; labkit runs --clean deletes the folder"


class RunList(list[Any]):
    """Runs, newest first; displays as a table. `unfinished` are the folders of launches that were killed."""

    def __init__(self, runs: Iterable[Any], unfinished: Sequence[Path] = ()):
        super().__init__(runs)
        self.unfinished = unfinished

    def _rows(self) -> list[tuple[str, str, str, str]]:
        states = [(run, run.status()) for run in self]
        rows = [
            (plain(run.id), state.state, words.seconds(state.seconds), _sentence(state) or _sweep_of(run.folder))
            for run, state in states
        ]
        return rows + [(plain(path.name), "lost", "n/a", KILLED) for path in self.unfinished]

    def __repr__(self) -> str:
        if not self._rows():
            return "no runs yet"
        return "\n".join(f"{id:<44} {state:<10} {time:>12}  {why}".rstrip() for id, state, time, why in self._rows())

    def _repr_html_(self) -> str:
        cell = 'style="text-align:left;padding:2px 10px"'
        body = "".join(
            "<tr>" + "".join(f"<td {cell}>{escaped(text)}</td>" for text in row) + "</tr>" for row in self._rows()
        )
        head = "".join(f"<th {cell}>{name}</th>" for name in ("run", "state", "time", "why"))
        return f"<table><tr>{head}</tr>{body}</table>" if body else "no runs yet"


def _sweep_of(folder: RunFolder) -> str:
    """`point 3 of the sweep …`, if the run is one of a sweep."""
    manifest = read_json(folder.manifest)
    mark = manifest.get("sweep") if isinstance(manifest, dict) else None
    return plain(f"point {mark.get('point')} of the sweep {mark.get('id')}") if isinstance(mark, dict) else ""


def _sentence(state: State) -> str:
    """The first line of why the run ended or what it waits for; some explanations are long."""
    sentence = str((state.cause or {}).get("sentence", "")) or state.notice or ""
    return plain(sentence.partition("\n")[0])[:120]
