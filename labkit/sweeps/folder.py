"""Names the files in the folder of a sweep, `<runs>/sweeps/<UTC>-<name>-<4 hex>/`, beside the runs that it starts.

    sweep.json   the points, the options and where it was started; written once, before anything runs
    script.py    the script of every run, as it was when the sweep was made
    agent.json   the process that owns the queue, or the job array of Slurm's that is the queue
    state.json   whether it runs and how it ended, and the points that could not be launched
    stop.json    a request to stop all of it, or some points
    checkpoints/ those of each point, if the script saves any, so that a point that is run again resumes

Which run belongs to which point is in the `run.json` of the runs, and nowhere else: it is written before a run's first
process starts. So whatever is killed at whatever time, no point is forgotten and none runs twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from labkit.arguments import Value
from labkit.errors import RunFolderError
from labkit.files import is_a, read_bytes, read_json, write_json
from labkit.host import Identity
from labkit.metric_names import Better
from labkit.place import original_of, path_of, the_one
from labkit.record import RunFolder, State
from labkit.stored_runs import RUN_ID, runs_root
from labkit.text import plain
from labkit.write import Script

# Options of a sweep that `sweep.json` records as they are
AS_GIVEN = ("nproc_per_node", "backend", "at_once", "retries", "watchdog", "stop_if", "metric", "halving")


class Job(NamedTuple):
    """One point at one rung; every sweep without successive halving has the single rung 0."""

    point: int
    rung: int = 0


@dataclass(frozen=True)
class SweepState:
    """`state` is "running", "succeeded", "failed", "stopped" or "lost"; times are seconds since the epoch.

    `sentence` says how many points succeeded and failed; `not_launched` holds the state of points
    without a run, and why they have none.
    """

    state: str
    started: float
    ended: float | None = None
    sentence: str = ""
    not_launched: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_final(self) -> bool:
        return self.state in State.FINAL

    @property
    def seconds(self) -> float:
        """How long the sweep took, or has taken so far, in seconds."""
        return (self.ended or time.time()) - self.started

    def __repr__(self) -> str:
        return f"{self.state} after {self.seconds:.1f} s" + (f": {self.sentence}" if self.sentence else "")


@dataclass(frozen=True)
class SweepManifest:
    """What is to run. `script_path` is None for a script that labkit composed; `script_origins` are the notebook cells
    that its parts came from. With successive halving, `rungs` are the steps at the end of each rung. `saves`: whether
    the script saves checkpoints. `env` is what was set for the ranks, without the values that may be secrets, of which
    `env_names` are all names. `slurm`: the job of every point."""

    name: str
    points: list[dict[str, Value]]
    script_name: str = ""
    script_path: str | None = None
    script_origins: Mapping[str, str] = field(default_factory=dict)
    rungs: list[int] | None = None
    saves: bool = False
    nproc_per_node: int | str = 1
    backend: str | None = None
    at_once: int | None = None
    args: list[str] = field(default_factory=list)
    retries: int = 0
    watchdog: float | None = None
    stop_if: str | None = None
    export: list[str] = field(default_factory=list)
    metric: str = "loss"
    lowest: bool = True
    halving: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    env_names: list[str] = field(default_factory=list)
    cwd: str = ""
    slurm: Mapping[str, Any] | None = None

    @property
    def better(self) -> dict[str, Better]:
        """Which values of the metric are better."""
        return {self.metric: "lower" if self.lowest else "higher"}

    def encode(self) -> dict[str, Any]:
        """The content of `sweep.json`."""
        values = asdict(self)
        if self.slurm is None:
            del values["slurm"]
        script = {name: values.pop(f"script_{name}") for name in ("name", "path", "origins")}
        options = {name: values.pop(name) for name in (*AS_GIVEN, "lowest", "args", "export")}
        return {"format": 1, **values, "script": script, "options": options}

    @classmethod
    def decode(cls, value: Any) -> SweepManifest:
        script = {f"script_{name}": each for name, each in value.get("script", {}).items()}
        known = {**value, **value.get("options", {}), **script}
        return cls(**{each.name: known[each.name] for each in fields(cls) if each.name in known})

    def parameters_of(self, job: Job, checkpoints: Path) -> tuple[dict[str, Value], list[str]]:
        """The parameters of a job's run, and the arguments that are passed to its script unchanged. `checkpoints` is
        the folder for those of all points."""
        parameters: dict[str, Any] = dict(self.points[job.point])
        args = [*self.args, *parameters.pop("args", [])]
        if self.rungs:
            parameters["steps"] = self.rungs[job.rung]
        if self.saves:
            parameters["checkpoint_dir"] = str(checkpoints / str(job.point))
        return parameters, args


class SweepFolder:
    """The names of the files of one sweep, and what is in them. It holds no state; every read goes to the disk."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path).absolute()
        self.id = self.path.name
        self.runs = self.path.parents[1]  # the folder of the runs
        self.manifest = self.path / "sweep.json"
        self.script = self.path / "script.py"
        self.agent = self.path / "agent.json"
        self.state = self.path / "state.json"
        self.stop_request = self.path / "stop.json"
        self.checkpoints = self.path / "checkpoints"
        self.lock = self.path / "lock"
        self.log = self.path / "sweeper.log"

    def read_manifest(self) -> SweepManifest:
        """The content of `sweep.json`. Raises RunFolderError when it is missing or damaged."""
        manifest = read_json(self.manifest)
        points = manifest.get("points") if isinstance(manifest, dict) else None
        if not isinstance(points, list) or not points or manifest.get("format") != 1:
            raise RunFolderError(plain(f"{self.path} is not a sweep this labkit can read: no sweep.json of format 1"))
        return SweepManifest.decode(manifest)

    def read_script(self, manifest: SweepManifest) -> Script:
        """The script of every run, with the notebook cells that its parts came from."""
        try:
            script = Script.read(read_bytes(self.script), self.script, name=manifest.script_name)
        except OSError as error:
            raise RunFolderError(plain(f"{self.script} cannot be read: {error.strerror}")) from None
        return replace(
            script, parts=tuple(replace(c, origin=manifest.script_origins.get(c.title, "")) for c in script.parts)
        )

    def read_state(self) -> SweepState:
        """The state of the sweep; "lost" if its process is gone and left no result."""
        alive = self.is_alive()  # read before the state, which is written before the process exits
        value = read_json(self.state)
        known = {each.name for each in fields(SweepState)}
        if not isinstance(value, dict) or not isinstance(value.get("started"), int | float):
            value = {"state": "running", "started": self.path.stat().st_mtime if self.path.exists() else time.time()}
        state = SweepState(**{name: each for name, each in value.items() if name in known})
        if state.is_final or alive:
            return state
        sentence = (
            "the sweep's process is gone (killed, or the machine was rebooted; its log is sweeper.log in its "
            "folder); resume() runs the remaining points"
        )
        if original := self.original():
            sentence = f"this folder is a copy of {original}, made while the sweep was active, and does not follow it"
        written = self.state.stat().st_mtime if self.state.exists() else state.started
        return replace(state, state="lost", ended=max(state.started, written), sentence=sentence)

    def write_state(self, state: SweepState) -> None:
        write_json(self.state, asdict(state))

    def is_alive(self) -> bool:
        """Whether the process that owns the queue is running, on this machine or, as far as can be known, another;
        Slurm always is. That of a copied sweep owns the queue of the original."""
        if self.original():
            return False
        if self.array():
            return True
        agent = read_json(self.agent)
        owner = Identity.read(agent.get("sweeper")) if isinstance(agent, dict) else None
        return owner is not None and (owner.is_elsewhere or owner.is_alive())

    def original(self) -> Path | None:
        """The folder that this one is a copy of; None if it is the original."""
        return original_of(self.path, read_json(self.manifest), self.manifest.name)

    def array(self) -> str | None:
        """The id of the job array whose tasks are the points; None for a sweep on this machine."""
        agent = read_json(self.agent)
        array = str(agent.get("slurm")) if isinstance(agent, dict) else ""
        return array if array.isdecimal() else None

    def write_agent(self, pid: int) -> None:
        identity = Identity.of(pid)
        write_json(self.agent, {"sweeper": identity.as_dict() if identity else None})

    def request_stop(self, points: Sequence[int] | None = None) -> None:
        """Ask the process of the sweep to stop these points, or everything."""
        before = self.requested_stop()
        points = None if points is None or before is None else sorted({*before, *points})
        write_json(self.stop_request, {"time": time.time(), "points": points})

    def requested_stop(self) -> list[int] | None:
        """The points whose stop was requested, empty without a request; None if it is all of them."""
        request = read_json(self.stop_request)
        if not isinstance(request, dict):
            return []
        points = request.get("points")
        return [each for each in points if isinstance(each, int)] if isinstance(points, list) else None

    def __repr__(self) -> str:
        return f"SweepFolder({str(self.path)!r})"


class RunIndex:
    """The runs of a sweep by job, read from the runs' folders. Each `run.json` is read once, however often it polls."""

    def __init__(self, sweep: SweepFolder):
        self._sweep = sweep
        self._seen: set[str] = set()
        self._runs: dict[Job, list[tuple[str, int, RunFolder]]] = {}

    def poll(self) -> dict[Job, RunFolder]:
        """The newest run of every job that has one."""
        for entry in os.scandir(self._sweep.runs) if self._sweep.runs.is_dir() else ():
            if entry.name not in self._seen and RUN_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                self._look(RunFolder(entry.path))
        return {job: max(runs, key=lambda run: run[:2])[2] for job, runs in self._runs.items()}

    def _look(self, folder: RunFolder) -> None:
        if not folder.manifest.exists():  # just being launched
            return
        self._seen.add(folder.id)
        mark = folder.glimpsed_manifest().sweep
        if mark is not None and mark.id == self._sweep.id:
            job = Job(mark.point, mark.rung or 0)
            launched = folder.manifest.stat().st_mtime_ns
            self._runs.setdefault(job, []).append((folder.id.partition("-")[0], launched, folder))


def find_sweep(which: str | os.PathLike[str], runs_dir: str | os.PathLike[str] | None = None) -> SweepFolder:
    """The sweep that `which` identifies: a path, "latest", an id, or a part of only one id. Raises RunFolderError."""
    path = path_of(which, "sweep", lambda path: os.sep in str(which))
    if path is None:
        root = runs_root(runs_dir) / "sweeps"
        found = root.glob("*/sweep.json") if is_a(Path.is_dir, root) else ()
        paths = sorted(found, key=lambda p: (p.parent.name.partition("-")[0], p.stat().st_mtime_ns))
        ids = [path.parent.name for path in paths]
        if not ids:
            raise RunFolderError(plain(f"no sweep in {root} yet. Start one with labkit.sweep(…)"))
        path = root / the_one(str(which), ids, "sweep", root)
    folder = SweepFolder(path)
    folder.read_manifest()
    return folder
