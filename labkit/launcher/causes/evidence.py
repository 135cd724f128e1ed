"""Gathers what an attempt that has ended left behind: records, errors, exit codes, logs. It draws no conclusions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from labkit.files import in_parallel, lines_of, number, read_json, read_object, read_source, tail_text
from labkit.launcher.causes.flight_recorder import RecordedCall, calls_of
from labkit.launcher.peers import Outcome
from labkit.record import Manifest, Node, Nodes, Place, RankHistory, RunFolder
from labkit.text import first_line, last_line, shortened
from labkit.write import Script

# torchrun's summary has one entry per failed rank.
EXIT_CODE = re.compile(r"^\s*rank\s*: (\d+) \(local_rank.*\n\s*exitcode\s*: (-?\d+)", re.MULTILINE)
CLOSED_BY_TORCHRUN = re.compile(r"Sending process (\d+) closing signal")
WATCHDOG = "Watchdog caught collective operation timeout"
LAST_WORDS_BYTES = 4000
LONGEST_LINE = 60  # of the script's text, in characters
SILENT_SECONDS = 4.0  # a rank sends a heartbeat every second, unless C code holds the GIL
MOSTLY = 0.5  # of a core: a rank that uses less waits
# The fields that a rank's error.json must have.
FIELDS = {"rank": int, "kind": str, "exception": str, "message": str}
# What gloo reports of a rank that has not called init_process_group within the time limit, and of ranks that have not
# called monitored_barrier.
NOT_JOINED = re.compile(r"wait timeout after (?P<ms>\d+)\s?ms, keys: /?default_pg/0//\w+//\d+/(?P<rank>\d+)\s*$")
NOT_AT_BARRIER = re.compile(r"Ranks? (?P<ranks>[\d, ]*\d) failed to pass monitoredBarrier")
# What a rank reports when another one is gone.
COLLATERAL = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|connectFullMesh"
    r"|remote process exited|ncclRemoteError|communicator was aborted|NCCL communicator|Socket Timeout"
    r"|Timed out waiting|Application timeout|failed to recv, got 0 bytes|Stop_waiting|SIGTERM|monitoredBarrier"
    r"|wait timeout after \d+\s?ms, keys: /?default_pg",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """How one rank failed, by its own record. `kind` is "exception" or "exit"; `exception` is the name of its class,
    `line` the script's, `call` torch's function that it waited in, in words; `causes` are the first lines of the
    original exceptions; `memory` is in bytes; `workers` are the exit codes by pid of the workers that had failed when
    their DataLoader raised."""

    rank: int
    kind: str
    message: str
    exception: str = ""
    step: int = 0
    time_ns: int = 0
    line: int | None = None
    call: str = ""
    traceback: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    out_of_memory: str | None = None
    perhaps_out_of_memory: bool = False
    memory: Mapping[str, float] = field(default_factory=dict)
    workers: Mapping[str, int] = field(default_factory=dict)
    handles: bool = False  # it is the exception that the rank handled when it lost the others

    @classmethod
    def read(cls, folder: RunFolder, rank: int) -> Failure | None:
        """A rank's record of its failure. If the file exists the rank failed, even if it cannot be read."""
        try:
            written = folder.error(rank).lstat().st_mtime_ns
        except OSError:
            return None
        error = read_json(folder.error(rank))
        if not isinstance(error, dict) or not all(isinstance(error.get(name), kind) for name, kind in FIELDS.items()):
            log = tail_text(folder.log(rank, "stderr"), LAST_WORDS_BYTES)
            message = f"its error.json cannot be read; the last line of its log: {last_line(log) or '(empty)'}"
            trace = tuple(map(shortened, log.splitlines(keepends=True)))
            return cls(rank, "exception", shortened(message), time_ns=written, traceback=trace)
        step, at, line = (error.get(name) for name in ("step", "time_ns", "script_line"))
        kind = error.get("out_of_memory")
        memory, workers = error.get("memory"), error.get("workers")
        codes = workers.items() if isinstance(workers, dict) else ()
        sizes = {name: number(size) for name, size in memory.items()} if isinstance(memory, dict) else {}
        failure = cls(
            error["rank"],
            error["kind"],
            shortened(error["message"]),
            error["exception"],
            step=step if isinstance(step, int) else 0,
            time_ns=at if isinstance(at, int) else 0,
            line=line if isinstance(line, int) else None,
            call=str(error.get("call") or ""),
            traceback=tuple(map(shortened, _texts(error.get("traceback")))),
            causes=_texts(error.get("causes")),
            out_of_memory=kind if kind in ("device", "host") else None,
            perhaps_out_of_memory=bool(error.get("perhaps_out_of_memory")),
            memory={name: size for name, size in sizes.items() if size is not None},
            workers={pid: code for pid, code in codes if type(code) is int},
        )
        handled = error.get("handled")
        return failure._of_handled(handled) if isinstance(handled, dict) and failure.is_collateral else failure

    def _of_handled(self, handled: Mapping[str, object]) -> Failure:
        """The failure that a rank handled when it lost the others, unless that was of the others, too."""
        message, name, line = (handled.get(key) for key in ("message", "exception", "script_line"))
        if not isinstance(message, str) or not isinstance(name, str) or COLLATERAL.search(f"{name}: {message}"):
            return self
        line = line if isinstance(line, int) else None
        return replace(self, message=shortened(message), exception=name, line=line, handles=True)

    @property
    def summary(self) -> str:
        """ValueError: boom"""
        return ": ".join(filter(None, (self.exception.split(".")[-1], first_line(self.message))))

    @property
    def text(self) -> str:
        return "".join(self.traceback) + self.message

    @property
    def mentions_others(self) -> bool:
        """Whether it speaks of a rank that is gone. A library may have wrapped the connection's error in its own."""
        return bool(COLLATERAL.search(self.text))

    @property
    def is_collateral(self) -> bool:
        """Whether the rank failed only because another one was gone."""
        return self.kind == "exception" and self.mentions_others and not self.workers and not self.handles


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank was at its last heartbeat: at `line` of the script, in `function`, for how many seconds without
    progress, and whether it waited there for other ranks, in which `call` of torch's. `busy` is the share of one core
    that it had used in the last ten seconds, `worker` the pid of its DataLoader's worker that it waited for, and
    `pooled` whether it waited for a multiprocessing.Pool."""

    line: int
    function: str
    seconds: float
    waits: bool
    call: str
    busy: float
    worker: int | None
    pooled: bool


@dataclass(frozen=True)
class Evidence:
    """`folder` is the attempt's, `run` the run's. `failures` are the ranks' own records, oldest first; `exits` are the
    exit codes that torchrun reported, its root cause last; `path` is the script's name in tracebacks; `ranks` are those
    that have started.

    `homes` are the folders with torchrun's logs, and `logs` these, one per node; `outcomes` are those of the nodes that
    wrote one. A run on one machine has one log, no `nodes` and no outcomes."""

    run: RunFolder
    folder: RunFolder
    homes: list[RunFolder]
    manifest: Manifest
    script: Script
    path: str
    ranks: list[int]
    failures: list[Failure]
    exits: dict[int, int]
    logs: dict[int, str]
    nodes: Nodes | None
    outcomes: dict[int, Outcome]

    @classmethod
    def gather(cls, run: RunFolder, folder: RunFolder) -> Evidence:
        manifest = run.read_manifest()
        path = str(manifest.script.path or run.script)
        nodes = manifest.nodes
        homes = [folder.node(node) for node in range(nodes.count)] if nodes else [folder]
        ranks = folder.started_ranks()
        logs = in_parallel(lambda home: tail_text(home.torchrun_log), homes)
        outcomes = in_parallel(Outcome.read, homes) if nodes else []
        failures = in_parallel(lambda rank: Failure.read(folder, rank), ranks)
        return cls(
            run=run,
            folder=folder,
            homes=homes,
            manifest=manifest,
            script=script_of(run, manifest),
            path=path,
            ranks=ranks,
            failures=sorted(filter(None, failures), key=lambda failure: failure.time_ns),
            exits={int(rank): int(code) for log in logs for rank, code in EXIT_CODE.findall(log)},
            logs=dict(enumerate(logs)),
            nodes=nodes,
            outcomes={node: outcome for node, outcome in enumerate(outcomes) if outcome},
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
        return Node.name(self.nodes, node, self.folder) if self.nodes else ""

    def was_ended(self, rank: int) -> bool:
        """Whether the rank's node was stopped because of an event elsewhere."""
        outcome = self.outcomes.get(self.nodes.of_rank(rank)) if self.nodes else None
        return outcome is not None and outcome.why is not None

    def named(self, rank: int) -> str:
        """`rank 3`, or `rank 3 on hB` for a run on several machines."""
        return f"rank {rank} on {self.host(self.nodes.of_rank(rank))}" if self.nodes else f"rank {rank}"

    def home(self, rank: int) -> RunFolder:
        """The folder of the supervisor that a rank belonged to."""
        return self.folder.node(self.nodes.of_rank(rank)) if self.nodes else self.run

    def closed_by_torchrun(self, rank: int) -> bool | None:
        """Whether torchrun sent TERM to the rank; None if the rank left no pid."""
        beat = read_object(self.folder.heartbeat(rank))
        return str(beat.get("pid")) in CLOSED_BY_TORCHRUN.findall(self.log_of(rank)) if beat else None

    def program(self, rank: int) -> str:
        """What the rank's process had become by exec, such as "bash run.sh"; empty if it was the script."""
        return str(read_object(self.folder.heartbeat(rank)).get("program") or "")

    def whereabouts(self, failure: Failure, rank: int) -> Whereabouts | None:
        """Where a rank was when another one failed; None if it had not sent a heartbeat for some seconds, or was not in
        the script."""
        path = self.folder.heartbeat(rank)
        beat = read_object(path)
        now, since, busy = (number(beat.get(name)) for name in ("t", "since", "busy"))
        if not beat.get("line") or now is None or since is None or busy is None:
            return None
        if failure.time_ns - path.stat().st_mtime_ns > SILENT_SECONDS * 1e9:
            return None
        waits = bool(beat["waits"]) and busy < MOSTLY
        worker = beat["worker"] if isinstance(beat.get("worker"), int) else None
        call, pooled = str(beat.get("call") or ""), beat.get("pooled") is True
        return Whereabouts(int(beat["line"]), str(beat["function"]), now - since, waits, call, busy, worker, pooled)

    def located(self, line: int | None) -> str:
        """` (train.py line 3: `dist.barrier()`)`, empty without a line."""
        lines = lines_of(str(self.script))
        text = lines[line - 1].strip() if line and line <= len(lines) else ""
        shown = text if len(text) <= LONGEST_LINE else f"{text[:LONGEST_LINE]}…"
        return f" ({self.locate(line)}: `{shown}`)" if text else ""

    def locate(self, line: int | None) -> Place | None:
        """Where a line of the script is: its cell, and the notebook cell that this came from."""
        return place_in(self.script, self.manifest, line) if line else None

    def collectives(self) -> dict[int, list[RecordedCall]]:
        """The calls of the ranks that failed, oldest first."""
        records = in_parallel(lambda rank: read_json(self.folder.collectives(rank)), self.ranks)
        each = zip(self.ranks, records, strict=True)
        return {rank: calls_of(record.get("collectives")) for rank, record in each if isinstance(record, dict)}

    @cached_property
    def aborted(self) -> set[int]:
        """The ranks that NCCL's watchdog ended: they only waited for another."""
        logs = in_parallel(lambda rank: tail_text(self.folder.log(rank, "stderr")), list(self.exits))
        return {rank for rank, log in zip(self.exits, logs, strict=True) if WATCHDOG in log}


def place_in(script: Script, manifest: Manifest, line: int) -> Place:
    """Where a line of the script is: its cell, and the notebook cell that this came from."""
    if (location := script.cell_at(line)) is None:
        return Place(line, script.name)
    cell, line_in_cell = location
    return Place(line, script.name, cell.title, manifest.cells.get(cell.title, ""), line_in_cell)


def script_of(run: RunFolder, manifest: Manifest) -> Script:
    """The script that a run has started, under the name that tracebacks have."""
    return Script.parse(_text(run.script), name=Path(str(manifest.script.path or run.script)).name)


def _ends(folder: RunFolder, rank: int) -> RankHistory:
    history = RankHistory(rank, folder.metrics(rank))
    history.read_ends()
    return history


def _texts(values: object) -> tuple[str, ...]:
    return tuple(value for value in values if isinstance(value, str)) if isinstance(values, list) else ()


def _text(path: Path) -> str:
    try:
        return read_source(path)
    except OSError:  # the explanation does without the script
        return ""
