"""The run folder: the one place that knows what a run's files are called."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit.errors import RunFolderError
from labkit.record.files import read_text
from labkit.record.session import working_folder
from labkit.record.text import plain

__all__ = [
    "MARKER",
    "NODE_MARKER",
    "RunFolder",
    "check_root",
    "find_run",
    "list_runs",
    "runs_root",
    "unfinished_launches",
]

# In the environment of every process of a run, so that all of them can be found again.
MARKER = "LABKIT_RUN"
NODE_MARKER = "LABKIT_NODE"  # and which node's it is, in a run on several
MOST_RANKS = 1_000_000
# Kept free for the last words of a run whose disk is full.
RESERVE_BYTES = 256 << 10
RUN_ID = re.compile(r"\d{8}T\d{6}Z-.+-[0-9a-f]{4}")
LAUNCHING_SECONDS = 60.0  # within which a launch has written run.json
# A checkpoint that has not grown for this long is not being saved any more.
FRESH_SECONDS = 5.0


class RunFolder:
    """Names inside one run folder. Holds no state of its own; every read goes to the disk."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path).absolute()
        self.id = self.path.name
        self.manifest = self.path / "run.json"
        self.script = self.path / "script.py"
        self.command = self.path / "command.txt"
        self.agent = self.path / "agent.json"
        self.processes = self.path / "processes.json"  # what descends from the supervisor that wrote agent.json
        self.state = self.path / "state.json"
        self.stop_request = self.path / "stop.json"
        self.inquiry = self.path / "inquiry.json"
        self.reserve = self.path / "reserve"
        self.torchrun_log = self.path / "torchrun.log"
        self.torchrun_logs = self.path / "torchrun"
        self.supervisor_log = self.path / "supervisor.log"
        self.checkpoints = self.path / "checkpoints"
        self.ranks = self.path / "ranks"
        self.hosts = self.path / "hosts"
        self.nodes = self.path / "nodes"  # in a run on several
        self.node_heartbeat = self.path / "heartbeat.json"  # of a node, see `node`
        self.outcome = self.path / "outcome.json"  # how torchrun ended there
        self.job = self.path / "slurm.json"  # which job of Slurm's starts the nodes
        self.launch_file = self.path / "job.sbatch"
        self.job_output = self.path / "slurm.out"
        self.report = self.path / "report.html"
        self.plan = self.path / "plan.json"  # the prediction, if there was one; written before the launch

    def rank(self, rank: int) -> Path:
        return self.ranks / str(rank)

    def metrics(self, rank: int) -> Path:
        return self.rank(rank) / "metrics.jsonl"

    def log(self, rank: int, stream: str = "stdout") -> Path:
        return self.rank(rank) / f"{stream}.log"

    def error(self, rank: int) -> Path:
        return self.rank(rank) / "error.json"

    def stacks(self, rank: int) -> Path:
        return self.rank(rank) / "stacks.txt"

    def heartbeat(self, rank: int) -> Path:
        return self.rank(rank) / "heartbeat.json"

    def collectives(self, rank: int) -> Path:
        return self.rank(rank) / "collectives.json"

    def profile(self, rank: int) -> Path:
        """What torch's profiler recorded; readers of such traces take the folder of them all."""
        return self.path / "profile" / f"rank{rank}.json.gz"

    def host(self, name: str) -> Path:
        return self.hosts / f"{slug(name)}.jsonl"

    def attempt(self, number: int) -> RunFolder:
        """Where the files of one attempt's ranks are: the folder itself for the first, one within it for a retry."""
        return self if number == 1 else RunFolder(self.path / "attempts" / str(number))

    def node(self, node: int | str) -> RunFolder:
        """What one node of an attempt writes: agent.json, state.json, heartbeat.json, outcome.json, torchrun's logs."""
        return RunFolder(self.nodes / str(node))

    @property
    def latest(self) -> RunFolder:
        """Where the newest attempt's ranks write."""
        return self.attempts()[-1]

    def checkpoint_folder(self) -> Path:
        """Where the script saves its checkpoints: here, or where its `--checkpoint-dir` says."""
        manifest = read_json(self.manifest)
        if not isinstance(manifest, dict):
            return self.checkpoints
        given = manifest.get("parameters")
        chosen = given.get("checkpoint_dir") if isinstance(given, dict) else None
        return Path(str(manifest.get("cwd", "")), str(chosen)) if chosen else self.checkpoints

    def newest_checkpoint(self) -> str | None:
        """The newest checkpoint that was committed, "step-200"; None when there is none."""
        commits = self.checkpoint_folder().glob("step-*/COMMIT.json")
        steps = {int(n): p.parent.name for p in commits if (n := p.parent.name.removeprefix("step-")).isdecimal()}
        return steps[max(steps)] if steps else None

    def checkpoint_being_saved(self) -> bool:
        """Whether a `step-N.tmp` is there that was written to within the last seconds."""
        now = time.time()
        try:
            return any(
                now - max(p.stat().st_mtime for p in [beside, *beside.iterdir()]) < FRESH_SECONDS
                for beside in self.checkpoint_folder().glob("step-*.tmp")
            )
        except OSError:  # renamed while we looked: committed
            return False

    def keep_reserve(self) -> None:
        """Take up a little room on the disk, to be given back when it is full and the end must be written down."""
        try:
            self.reserve.write_bytes(bytes(RESERVE_BYTES))
        except OSError:
            self.reserve.unlink(missing_ok=True)

    def attempts(self) -> list[RunFolder]:
        """Every attempt so far, in order; the last is the one that counts."""
        found = [p for p in (self.path / "attempts").glob("*") if p.name.isdecimal()]
        return [self, *(RunFolder(p) for p in sorted(found, key=lambda p: int(p.name)))]

    def started_ranks(self) -> list[int]:
        """Ranks whose worker has begun to write, in order."""
        if not self.ranks.is_dir():
            return []
        return sorted(int(p.name) for p in self.ranks.iterdir() if p.name.isdecimal())

    def read_manifest(self) -> dict[str, Any]:
        """`run.json`. Raises RunFolderError when it is missing or not ours."""
        manifest = read_json(self.manifest)
        if not isinstance(manifest, dict) or manifest.get("format") != 1:
            raise RunFolderError(plain(f"{self.path} is not a run folder this labkit can read: {_format_of(manifest)}"))
        return _sound(manifest, self)

    def launched(self) -> float | None:
        """When the run was launched, in seconds since the epoch; None when run.json does not tell."""
        try:
            return datetime.fromisoformat((read_json(self.manifest) or {})["created"]).timestamp()
        except (KeyError, TypeError, ValueError):
            return None

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @classmethod
    def create(cls, root: Path, name: str) -> RunFolder:
        """A new, empty folder `<UTC time>-<name>-<4 hex>` under `root`, readable by its owner only."""
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        path = root / f"{stamp}-{slug(name)}-{secrets.token_hex(2)}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700)
        except FileExistsError:
            if path.exists():  # two launches within one second drew the same four digits
                return cls.create(root, name)
            raise _no_root(root, "it is a file, expected a folder") from None
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise _no_root(root, getattr(error, "strerror", None) or str(error)) from None
        return cls(path)


def _sound(manifest: dict[str, Any], folder: RunFolder) -> dict[str, Any]:
    """With what every reader relies on, whatever somebody has made of the file."""
    name, ranks, script, cells = (manifest.get(key) for key in ("name", "world_size", "script", "cells"))
    path = script.get("path") if isinstance(script, dict) else None
    digest = script.get("sha256") if isinstance(script, dict) else None
    counts = isinstance(ranks, int) and not isinstance(ranks, bool) and 0 < ranks <= MOST_RANKS
    return manifest | {
        "name": name if isinstance(name, str) else folder.id,
        "world_size": ranks if counts else len(folder.started_ranks()),
        "script": {"path": path if isinstance(path, str) else None, "sha256": digest},
        "cells": {k: v for k, v in cells.items() if isinstance(v, dict)} if isinstance(cells, dict) else {},
    }


def check_root(root: Path) -> None:
    """Whether a run could be kept there, without a trace. Raises RunFolderError."""
    there = next(path for path in (root, *root.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise _no_root(root, "it is a file, expected a folder" if there == root else os.strerror(errno.ENOTDIR))
    if not os.access(there, os.W_OK | os.X_OK):
        readonly = hasattr(os, "statvfs") and os.statvfs(there).f_flag & os.ST_RDONLY
        raise _no_root(root, os.strerror(errno.EROFS if readonly else errno.EACCES))


def _no_root(root: Path, why: str) -> RunFolderError:
    return RunFolderError(
        plain(
            f"runs cannot be kept in {root}: {why}. "
            "Give a folder you can write to with runs_dir=… or the LABKIT_RUNS environment variable"
        )
    )


def _format_of(manifest: Any) -> str:
    if not manifest or not isinstance(manifest, dict):
        return "no readable run.json, expected format 1"
    versions = manifest.get("versions")
    writer = versions.get("labkit") if isinstance(versions, dict) else None
    return f"format {manifest.get('format')!r}, expected format 1" + (f"; labkit {writer} wrote it" if writer else "")


def slug(name: str) -> str:
    """`name` reduced to what is safe in a file name on every system, never empty or hidden."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-_")[:60] or "run"


def runs_root(runs_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where runs are kept: the argument, `LABKIT_RUNS`, or `runs` in the current folder, on Kaggle in what it keeps."""
    return Path(runs_dir or os.environ.get("LABKIT_RUNS") or working_folder() / "runs").absolute()


def list_runs(runs_dir: str | os.PathLike[str] | None = None) -> list[RunFolder]:
    """Run folders under the runs root, oldest first. Links that lead elsewhere are not followed."""
    root = runs_root(runs_dir)
    if not is_a(Path.is_dir, root):
        return []
    paths = (p for p in root.iterdir() if not p.is_symlink() and _holds_a_run(p))
    return [RunFolder(p) for p in sorted(paths, key=_launch_order)]


def unfinished_launches(runs_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """Folders of launches that were killed before they had written `run.json`. One that is new may be under way."""
    root = runs_root(runs_dir)
    if not is_a(Path.is_dir, root):
        return []
    named = [path for path in root.iterdir() if RUN_ID.fullmatch(path.name) and is_a(Path.is_dir, path)]
    return sorted(p for p in named if not _holds_a_run(p) and time.time() - p.stat().st_mtime > LAUNCHING_SECONDS)


def is_a(test: Callable[[Path], bool], path: Path) -> bool:
    """`test(path)`, False for what no file system can hold: too long, with a NUL."""
    try:
        return test(path)
    except (OSError, ValueError):
        return False


def _holds_a_run(path: Path) -> bool:
    return is_a(Path.is_file, path / "run.json") and not (path / "run.json").is_symlink()


def _launch_order(path: Path) -> tuple[str, int]:
    # run.json is written once, at launch: it orders runs of the same second.
    return path.name.split("-")[0], (path / "run.json").stat().st_mtime_ns


def find_run(which: str | os.PathLike[str], runs_dir: str | os.PathLike[str] | None = None) -> RunFolder:
    """The run that `which` means: a path, "latest", a run's id, or any part of an id that only one run has."""
    if not isinstance(which, str | os.PathLike):
        raise RunFolderError(f"a run is meant by its id, part of one, a path, or 'latest'; got {which!r}")
    if isinstance(which, os.PathLike) or _holds_a_run(Path(which)):
        if not _holds_a_run(Path(which)):
            raise RunFolderError(plain(f"{which} is not a run folder: it has no run.json"))
        return RunFolder(which)
    folders = list_runs(runs_dir)
    if not folders:
        raise RunFolderError(plain(f"no run in {runs_root(runs_dir)} yet. Start one with labkit.launch(…)"))
    if which == "latest":
        return folders[-1]
    matching = [f for f in folders if which in f.id]
    exact = [f for f in matching if f.id == which]
    if len(exact or matching) == 1:
        return (exact or matching)[0]
    known = ", ".join(f.id for f in (matching or folders)[-5:])
    problem = f"{len(matching)} runs match {which!r}" if matching else f"no run matches {which!r}"
    raise RunFolderError(plain(f"{problem} in {runs_root(runs_dir)}; the newest are: {known}"))


def read_json(path: Path) -> Any:
    """The JSON value in a file, or None when there is no readable one."""
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return None


def write_json(path: Path, value: Mapping[str, Any], *, reserve: Path | None = None) -> None:
    """Replace a JSON file in one step: a reader sees the old text or the new one, never half of it.

    On a full disk half of the `reserve` file, if there is one, is given up for it. Raises OSError.
    """
    try:
        _replace(path, value)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or reserve is None or not reserve.exists():
            raise
        os.truncate(reserve, reserve.stat().st_size // 2)
        _replace(path, value)


def _replace(path: Path, value: Mapping[str, Any]) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(2)}")
    # ASCII only: a file name that is not UTF-8 reaches us as text that cannot be encoded
    text = json.dumps(value, indent=1) + "\n"
    try:
        new.write_text(text, encoding="ascii")
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
