"""The run folder: the single place that defines the names of a run's files."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit import rank_files
from labkit.errors import RunFolderError
from labkit.files import read_json
from labkit.metric_names import Better, Directions
from labkit.place import check_original, check_own, moved_from, original_of
from labkit.record.manifest import Manifest
from labkit.record.metric_options import MetricOptions
from labkit.text import plain, slug
from labkit.version import __version__

FORMAT = 1  # of run.json and, with it, of all files in the folder
# Disk space that is released for the final records when the disk is full.
RESERVE_BYTES = 256 << 10
# A checkpoint that has not grown for this long is no longer being saved.
FRESH_SECONDS = 5.0


class _In:
    """A file or folder in a run folder. Its path is made when it is asked for: a list of runs has thousands."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, folder: RunFolder, owner: type) -> Path:
        return folder.path / self.name


class RunFolder:
    """The names of the files in one run folder. Every read goes to the disk, except of run.json, which is final."""

    manifest = _In("run.json")
    guest = _In("guest.pyc")  # what torchrun starts on each rank, see worker/guest.py
    outermost = _In("outermost.pyc")  # what starts the supervisor, see launcher/warm/outermost.py
    script = _In(rank_files.SCRIPT)
    command = _In("command.txt")
    agent = _In("agent.json")
    processes = _In("processes.json")  # the descendants of the supervisor that wrote agent.json
    state = _In("state.json")
    left_running = _In("left-running.json")  # see state.py
    stop_request = _In("stop.json")
    inquiry = _In(rank_files.INQUIRY)
    requests = _In(rank_files.REQUESTS)  # to the ranks of an attempt, see requests.py; missing if not reachable
    cells = _In("cells")  # that ranks wait for, see worker/cell_folder.py; only in a run of labkit.ranks
    events = _In(rank_files.EVENTS)  # what was asked of them
    reserve = _In(rank_files.RESERVE)
    torchrun_log = _In("torchrun.log")
    torchrun_logs = _In("torchrun")
    supervisor_log = _In("supervisor.log")
    checkpoints = _In("checkpoints")
    ranks = _In(rank_files.RANKS)
    hosts = _In("hosts")
    nodes = _In("nodes")  # in a run on several nodes
    carried = _In("carried")  # what the program needs, for nodes that do not see where it was launched
    node_heartbeat = _In("heartbeat.json")  # of a node, see `node`
    fold = _In("fold.json")  # of a node, see fold.py
    fold_series = _In("fold-series.json")
    outcome = _In("outcome.json")  # how torchrun ended there
    findings = _In("findings.json")  # of an attempt: what is wrong with its training
    job = _In("slurm.json")  # the Slurm job that starts the nodes
    launch_file = _In("job.sbatch")
    job_output = _In("slurm.out")
    report = _In("report.html")
    exports = _In("exports.json")  # what a live export has written so far, or why it failed
    export_log = _In("export.log")
    alerts = _In("alerts.json")  # why an alert was not sent
    alert_log = _In("alert.log")
    labels = _In("labels.json")  # the user's tags and note
    metric_options = _In("metrics.json")  # what the owner says of single metrics, see metric_options.py
    plan = _In("plan.json")  # the prediction, if there is one; written before the launch

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path).absolute()
        self.id = self.path.name
        self._content: Any = None  # of run.json, once it is there
        self._manifest: Manifest | None = None

    def rank(self, rank: int) -> Path:
        return self.ranks / str(rank)

    def metrics(self, rank: int) -> Path:
        return self.ranks.joinpath(str(rank), rank_files.METRICS)

    def log(self, rank: int, stream: str = "stdout") -> Path:
        return self.rank(rank) / f"{stream}.log"

    def error(self, rank: int) -> Path:
        return self.rank(rank) / rank_files.ERROR

    def stacks(self, rank: int) -> Path:
        return self.rank(rank) / rank_files.STACKS

    def heartbeat(self, rank: int) -> Path:
        return self.rank(rank) / rank_files.HEARTBEAT

    def collectives(self, rank: int) -> Path:
        return self.rank(rank) / rank_files.COLLECTIVES

    def ring(self, rank: int) -> Path:
        return self.rank(rank) / rank_files.RING

    def witnessed(self, rank: int) -> Path:
        return self.rank(rank) / rank_files.WITNESSED

    def digests(self, rank: int) -> Path:
        return self.rank(rank) / rank_files.DIGESTS

    def profile(self, rank: int) -> Path:
        """The trace of torch's profiler; trace viewers open the folder with all ranks' traces."""
        return self.path / "profile" / f"rank{rank}.json.gz"

    def host(self, name: str) -> Path:
        return self.hosts / f"{slug(name)}.jsonl"

    def attempt(self, number: int) -> RunFolder:
        """The folder of one attempt: this folder for the first, a subfolder for a retry."""
        return self if number == 1 else RunFolder(self.path / "attempts" / str(number))

    def node(self, node: int | str) -> RunFolder:
        """The folder that one node of an attempt writes: agent.json, state.json, heartbeat.json, outcome.json, logs."""
        return RunFolder(self.nodes / str(node))

    @property
    def marker(self) -> str:
        """The value of MARKER in the environment of the run's processes: the name of its folder at the launch."""
        return self.glimpsed_manifest().id or self.id

    @property
    def latest(self) -> RunFolder:
        """The folder of the newest attempt."""
        return self.attempts()[-1]

    def checkpoint_folder(self) -> Path:
        """Where the script saves its checkpoints: in this folder, or in its `--checkpoint-dir`."""
        manifest = self.glimpsed_manifest()
        path = manifest.parameters.get("checkpoint_dir")
        return Path(manifest.cwd, str(path)) if path else self.checkpoints

    def newest_checkpoint(self) -> str | None:
        """The newest committed checkpoint, such as "step-200"; None if there is none."""
        commits = self.checkpoint_folder().glob("step-*/COMMIT.json")
        steps = {int(n): p.parent.name for p in commits if (n := p.parent.name.removeprefix("step-")).isdecimal()}
        return steps[max(steps)] if steps else None

    def checkpoint_being_saved(self) -> bool:
        """Whether a `step-N.tmp` exists that was written to within the last FRESH_SECONDS."""
        now = time.time()
        try:
            return any(
                now - max(p.stat().st_mtime for p in [partial, *partial.iterdir()]) < FRESH_SECONDS
                for partial in self.checkpoint_folder().glob("step-*.tmp")
            )
        except OSError:  # renamed meanwhile: committed
            return False

    def keep_reserve(self) -> None:
        """Reserve a little disk space, which is released when the disk is full and the final state must be written."""
        try:
            self.reserve.write_bytes(bytes(RESERVE_BYTES))
        except OSError:
            self.reserve.unlink(missing_ok=True)

    def attempts(self) -> list[RunFolder]:
        """The folders of all attempts so far, in order; the last one determines the run's state."""
        retries = self.path / "attempts"
        return [self, *(RunFolder(retries / str(number)) for number in _numbers_in(retries))]

    def started_ranks(self) -> list[int]:
        """The ranks that have created their folders, in order."""
        return _numbers_in(self.ranks)

    def read_manifest(self) -> Manifest:
        """The content of `run.json`. Raises RunFolderError when it is missing or has another format."""
        manifest, content = self.glimpsed_manifest(), self._content
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise RunFolderError(plain(f"{self.path} is not a run folder this labkit can read: {_format_of(content)}"))
        return manifest

    def of_another_version(self) -> str:
        """Why this labkit does not know what the run's files mean; empty if it does, or if there is no run.json."""
        self.glimpsed_manifest()
        other = isinstance(self._content, dict) and self._content.get("format", FORMAT) != FORMAT
        return plain(_format_of(self._content)) if other else ""

    def glimpsed_manifest(self) -> Manifest:
        """What can be read of `run.json`, for a list that must not fail for one run."""
        if self._manifest is None:
            self._content = read_json(self.manifest)
            manifest = Manifest.decode(self._content)
            size = manifest.world_size or len(self.started_ranks())
            manifest = replace(manifest, name=manifest.name or self.id, world_size=size)
            if self._content is None:
                return manifest
            self._manifest = manifest
        return self._manifest

    def directions(self) -> Directions:
        """Whether lower or higher values of the run's metrics are better, as far as it is known."""
        declared = MetricOptions.read_all(self.metric_options)
        said = {name: options.better for name, options in declared.items() if options.better}
        return Directions(said, self.glimpsed_manifest().directions)

    def metrics_from_log(self) -> list[str]:
        """The metrics whose values are read from the log of rank 0."""
        return [name for name, options in MetricOptions.read_all(self.metric_options).items() if options.from_log]

    def describe_metric(self, name: str, *, better: Better | None = None, from_log: bool | None = None) -> None:
        """Keep what the owner says of a metric. Raises OSError."""
        MetricOptions(better, from_log).write(self.metric_options, name)

    def original(self) -> Path | None:
        """The folder that this one is a copy of; None if it is the original itself, wherever it is now."""
        self.glimpsed_manifest()
        return original_of(self.path, self._content)

    def moved_from(self) -> Path | None:
        """Where the folder was made, if it has been moved or copied since; None if not, or if run.json does not say."""
        self.glimpsed_manifest()
        return moved_from(self.path, self._content)

    def check_original(self) -> None:
        """Raise RunFolderError if the folder is a copy of another one."""
        check_original(self.path, self.original())

    def check_own(self, what: str) -> None:
        """Raise RunFolderError unless the folder belongs to this user; `what` continues "only its owner can"."""
        check_own(self.path, self.id, what)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @staticmethod
    def check_root(root: Path) -> None:
        """Raise RunFolderError if runs cannot be stored there. Creates nothing."""
        existing = next(path for path in (root, *root.parents) if os.path.lexists(path))
        if not existing.is_dir():
            raise _no_root(root, "it is a file, expected a folder" if existing == root else os.strerror(errno.ENOTDIR))
        if not os.access(existing, os.W_OK | os.X_OK):
            readonly = hasattr(os, "statvfs") and os.statvfs(existing).f_flag & os.ST_RDONLY
            raise _no_root(root, os.strerror(errno.EROFS if readonly else errno.EACCES))

    @classmethod
    def create(cls, root: Path, name: str) -> RunFolder:
        """A new, empty folder `<UTC time>-<name>-<4 hex>` under `root`, readable by its owner only."""
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        path = root / f"{stamp}-{slug(name)}-{os.urandom(2).hex()}"
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


def _numbers_in(folder: Path) -> list[int]:
    """The numbers that name what is in it, in order."""
    try:
        with os.scandir(folder) as entries:
            return sorted(int(entry.name) for entry in entries if entry.name.isdecimal())
    except OSError:  # not there yet
        return []


def _no_root(root: Path, why: str) -> RunFolderError:
    return RunFolderError(
        plain(
            f"runs cannot be stored in {root}: {why}. "
            "Set a writable folder with runs_dir=… or the LABKIT_RUNS environment variable"
        )
    )


def _format_of(manifest: Any) -> str:
    if not manifest or not isinstance(manifest, dict):
        return f"no readable run.json, expected format {FORMAT}"
    versions = manifest.get("versions")
    writer = versions.get("labkit") if isinstance(versions, dict) else None
    by = f"labkit {writer} wrote it, and " if writer else ""
    return f"format {manifest.get('format')!r}, expected format {FORMAT}; {by}this is labkit {__version__}"
