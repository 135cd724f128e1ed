"""What an attempt that has ended left behind: records, errors, exit codes, logs. No conclusions are drawn here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from labkit.files import in_parallel, opened, read_json, read_source
from labkit.launcher.causes.flight_record import Call, calls_of
from labkit.record import Manifest, Nodes, RankHistory, RunFolder, name_of
from labkit.text import last_line, shortened
from labkit.write import Script

__all__ = ["CLOSED_BY_TORCHRUN", "LAST_WORDS_BYTES", "Evidence", "tail_text"]

# torchrun's summary has one entry per failed rank.
EXIT_CODE = re.compile(r"^\s*rank\s*: (\d+) \(local_rank.*\n\s*exitcode\s*: (-?\d+)", re.MULTILINE)
CLOSED_BY_TORCHRUN = re.compile(r"Sending process (\d+) closing signal")
WATCHDOG = "Watchdog caught collective operation timeout"
LOG_TAIL_BYTES = 200_000
LAST_WORDS_BYTES = 4000
# The fields that a rank's error.json must have.
FIELDS = {"rank": int, "kind": str, "exception": str, "message": str}


@dataclass(frozen=True)
class Evidence:
    """`folder` is the attempt's, `run` the run's. `failures` are the ranks' own records, oldest first; `exits` are the
    exit codes that torchrun reported, its root cause last; `path` is the script's name in tracebacks; `ranks` are those
    that have started.

    `logs` are torchrun's, one per node; `outcomes` are those of the nodes that wrote one. A run on one machine has one
    log, no `nodes` and no outcomes."""

    run: RunFolder
    folder: RunFolder
    manifest: Manifest
    script: Script
    path: str
    ranks: list[int]
    failures: list[dict[str, Any]]
    exits: dict[int, int]
    logs: dict[int, str]
    nodes: Nodes | None
    outcomes: dict[int, dict[str, Any]]

    @classmethod
    def gather(cls, run: RunFolder, folder: RunFolder) -> Evidence:
        manifest = run.read_manifest()
        path = str(manifest.script.path or run.script)
        nodes = manifest.nodes
        homes, ranks = _homes(folder, nodes), folder.started_ranks()
        logs = in_parallel(lambda home: tail_text(home.torchrun_log), homes)
        outcomes = in_parallel(lambda home: read_json(home.outcome), homes) if nodes else []
        failures = in_parallel(lambda rank: _failure(folder, rank), ranks)
        return cls(
            run=run,
            folder=folder,
            manifest=manifest,
            script=Script.parse(_text(run.script), name=Path(path).name),
            path=path,
            ranks=ranks,
            failures=sorted(filter(None, failures), key=lambda e: e["time_ns"]),
            exits={int(rank): int(code) for log in logs for rank, code in EXIT_CODE.findall(log)},
            logs=dict(enumerate(logs)),
            nodes=nodes,
            outcomes={node: outcome for node, outcome in enumerate(outcomes) if isinstance(outcome, dict)},
        )

    @property
    def log(self) -> str:
        return "".join(self.logs.values())

    @cached_property
    def ends(self) -> dict[int, RankHistory]:
        """The first and last records of each rank."""
        return dict(zip(self.ranks, in_parallel(lambda rank: _ends(self.folder, rank), self.ranks), strict=True))

    def history(self, rank: int) -> RankHistory | None:
        """All records of one rank; None if it has not started."""
        if rank not in self.ranks:
            return None
        whole = RankHistory(rank, self.folder.metrics(rank))
        whole.read_all()
        return whole

    def log_of(self, rank: int) -> str:
        """The log of the torchrun that started a rank."""
        return self.logs.get(self.nodes.of_rank(rank) if self.nodes else 0, "")

    def host(self, node: int) -> str:
        return name_of(self.nodes, node, self.folder) if self.nodes else ""

    def was_ended(self, rank: int) -> bool:
        """Whether the rank's node was stopped because of an event elsewhere."""
        return bool(self.nodes and self.outcomes.get(self.nodes.of_rank(rank), {}).get("why"))

    def on_host(self, rank: int) -> str:
        """` on hB`; empty for a run on one machine."""
        return f" on {self.host(self.nodes.of_rank(rank))}" if self.nodes else ""

    def homes(self) -> list[RunFolder]:
        """The folders with torchrun's logs: the attempt's, or one per node."""
        return _homes(self.folder, self.nodes)

    def home(self, rank: int) -> RunFolder:
        """The folder of the supervisor that a rank belonged to."""
        return self.folder.node(self.nodes.of_rank(rank)) if self.nodes else self.run

    def closed_by_torchrun(self, rank: int) -> bool | None:
        """Whether torchrun sent TERM to the rank; None if the rank left no pid."""
        beat = read_json(self.folder.heartbeat(rank))
        return str(beat.get("pid")) in CLOSED_BY_TORCHRUN.findall(self.log_of(rank)) if isinstance(beat, dict) else None

    def program(self, rank: int) -> str:
        """What the rank's process had become by exec, such as "bash run.sh"; empty if it was the script."""
        beat = read_json(self.folder.heartbeat(rank))
        return str(beat.get("program") or "") if isinstance(beat, dict) else ""

    def locate(self, line: int | None) -> dict[str, Any]:
        """Where a line of the script is: its cell, and the notebook cell that this came from."""
        if not line:
            return {}
        location = self.script.cell_at(line)
        if location is None:
            return {"line": line, "place": f" ({self.script.name} line {line})"}
        cell, line_in_cell = location
        origin = self.manifest.cells.get(cell.title, "")
        from_notebook = f" from {origin}" if origin else ""
        where = f"{self.script.name} line {line}, cell `{cell.title}`{from_notebook}, line {line_in_cell} of the cell"
        return {
            "line": line,
            "cell": cell.title,
            "origin": origin,
            "line_in_cell": line_in_cell,
            "place": f" ({where})",
        }

    def collectives(self) -> dict[int, list[Call]]:
        """The calls of the ranks that failed, oldest first."""
        records = in_parallel(lambda rank: read_json(self.folder.collectives(rank)), self.ranks)
        each = zip(self.ranks, records, strict=True)
        return {rank: calls_of(record.get("collectives")) for rank, record in each if isinstance(record, dict)}

    @cached_property
    def aborted(self) -> set[int]:
        """The ranks that NCCL's watchdog ended: they only waited for another."""
        logs = in_parallel(lambda rank: tail_text(self.folder.log(rank, "stderr")), list(self.exits))
        return {rank for rank, log in zip(self.exits, logs, strict=True) if WATCHDOG in log}


def _homes(folder: RunFolder, nodes: Nodes | None) -> list[RunFolder]:
    return [folder.node(node) for node in range(nodes.count)] if nodes else [folder]


def _ends(folder: RunFolder, rank: int) -> RankHistory:
    history = RankHistory(rank, folder.metrics(rank))
    history.read_ends()
    return history


def _failure(folder: RunFolder, rank: int) -> dict[str, Any] | None:
    """A rank's record of its failure. If the file exists the rank failed, even if it cannot be read."""
    try:
        written = folder.error(rank).lstat().st_mtime_ns
    except OSError:
        return None
    error = read_json(folder.error(rank))
    if _is_sound(error):
        return _whole(error)
    log = tail_text(folder.log(rank, "stderr"), LAST_WORDS_BYTES)
    message = f"its error.json cannot be read; the last line of its log: {last_line(log) or '(empty)'}"
    failure = {"rank": rank, "kind": "exception", "exception": "", "message": message, "time_ns": written}
    return _whole(failure | {"traceback": log.splitlines(keepends=True)})


def _whole(error: dict[str, Any]) -> dict[str, Any]:
    """The record with every field that an explanation uses."""
    step, line, trace, causes = (error.get(name) for name in ("step", "script_line", "traceback", "causes"))
    return error | {
        "message": shortened(error["message"]),
        "step": step if isinstance(step, int) else 0,
        "time_ns": error["time_ns"] if isinstance(error.get("time_ns"), int) else 0,
        "script_line": line if isinstance(line, int) else None,
        "traceback": [shortened(part) for part in trace if isinstance(part, str)] if isinstance(trace, list) else [],
        "causes": [part for part in causes if isinstance(part, str)] if isinstance(causes, list) else [],
    }


def _text(path: Path) -> str:
    try:
        return read_source(path)
    except OSError:  # the explanation does without the script
        return ""


def _is_sound(error: Any) -> bool:
    return isinstance(error, dict) and all(isinstance(error.get(name), kind) for name, kind in FIELDS.items())


def tail_text(path: Any, size: int = LOG_TAIL_BYTES) -> str:
    """The last `size` bytes of a log as text, with invalid UTF-8 replaced."""
    try:
        with opened(path) as file:
            file.seek(max(0, file.seek(0, 2) - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
