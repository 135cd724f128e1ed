"""Takes a sweep from its call to its process: checks every point, writes the folder, starts the queue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from labkit.arguments import Parameters
from labkit.cluster import JobOptions
from labkit.errors import LabError, RunFolderError, ScriptError
from labkit.files import removed_on_failure, write_json
from labkit.launch_options import LaunchOptions
from labkit.launcher import Launch, check_arguments, prepare_launch, recorded_environment, script_and_file
from labkit.record import Nodes, RunFolder
from labkit.session import current_folder
from labkit.stored_runs import runs_root
from labkit.sweeps.folder import AS_GIVEN, SweepFolder, SweepManifest, SweepState
from labkit.sweeps.options import SweepOptions, expanded
from labkit.sweeps.sweeper import room_for, rungs_of
from labkit.write import Script, completed, options_of

ENDING_SECONDS = 10.0  # the process of a sweep exits shortly after it has written the final state
_processes: list[subprocess.Popen[bytes]] = []  # one that has ended is a zombie until it is polled


def create(
    script: Script | str | os.PathLike[str],
    options: SweepOptions,
    parameters: Parameters,
    settings: Mapping[str, str],
    job: JobOptions | None = None,
) -> SweepFolder:
    """Check every point of a sweep and write its folder; nothing is started. `settings` are the ranks' variables; with
    `job`, whose counts are numbers, Slurm runs the points.

    Raises LabError for the first point that could not be launched, before creating anything.
    """
    options.check()
    points = expanded(parameters, points=options.points, samples=options.samples, seed=options.sample_seed)
    args = check_arguments(options.args)
    text, source = script_and_file(script)
    if job is None:
        room_for(options.nproc_per_node, options.backend, options.at_once, settings)
    rungs = _rungs(text, source, options, points) if options.halving else None
    same = {name: getattr(options, name) for name in ("nproc_per_node", "backend", "stop_if")}
    common = LaunchOptions(args=args, env=settings, **same)
    launches = _prepared(text, source, common, points, job.counts if job else None)
    facts = launches[0].facts
    created = datetime.now(UTC).isoformat(timespec="milliseconds")
    manifest = SweepManifest(
        name=str(options.name or text.name),
        points=points,
        script_name=text.name,
        script_path=str(source) if source else None,
        script_origins={cell.title: cell.origin for cell in text.parts if cell.origin},
        rungs=rungs,
        saves=rungs is not None or _all_save(launches),
        args=args,
        export=[options.export] if isinstance(options.export, str) else list(options.export or ()),
        env=recorded_environment(settings),
        env_names=sorted(settings),
        cwd=str(current_folder()),
        slurm=vars(job) if job else None,
        lowest=options.lowest(facts.better if facts else {}),
        **{name: getattr(options, name) for name in AS_GIVEN},
    )
    root = runs_root(options.runs_dir)
    RunFolder.check_root(root)
    made = RunFolder.create(root / "sweeps", manifest.name)
    folder = SweepFolder(made.path)
    with removed_on_failure(made.path):
        folder.script.write_bytes(text.encoded())
        write_json(
            folder.manifest, manifest.encode() | {"created": created, "id": folder.id, "folder": str(folder.path)}
        )
    return folder


def start_process(folder: SweepFolder, env: Mapping[str, str], *, tied: bool, failed: bool = False) -> None:
    """Start the process that owns the queue. `tied`: it stops with this process. `failed`: failed points run again.

    Raises LabError if the sweep already has one, RunFolderError if it cannot be started.
    """
    manifest = folder.read_manifest()
    _processes[:] = [process for process in _processes if process.poll() is None]
    with _starting(folder):
        latest = time.monotonic() + ENDING_SECONDS
        while folder.is_alive():
            if not folder.read_state().is_final or time.monotonic() > latest:
                raise LabError(f"{folder.id} is already running; sweep.wait() waits for it, sweep.stop() stops it")
            time.sleep(0.02)
        folder.stop_request.unlink(missing_ok=True)
        reader, writer = os.pipe()
        owner = str(os.getpid() if tied else 0)
        try:
            folder.write_state(SweepState("running", time.time()))
            with folder.log.open("ab") as log:
                process = subprocess.Popen(
                    # -P: a `random.py` in the working folder must not be imported instead of the standard library's
                    [sys.executable, "-P", "-m", "labkit.sweeps.sweeper", str(folder.path), owner],
                    cwd=manifest.cwd,
                    stdin=reader,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a notebook's interrupt reaches the kernel's whole process group
                )
            folder.write_agent(process.pid)
        except OSError as error:
            os.close(writer)
            raise RunFolderError(f"the sweep could not be started in {manifest.cwd}: {error}") from None
        finally:
            os.close(reader)
        _processes.append(process)
        with suppress(BrokenPipeError), os.fdopen(writer, "w") as pipe:  # its log says why it has exited
            json.dump({"env": dict(env), "failed": failed}, pipe)


def environment_of(folder: SweepFolder, env: Mapping[str, str] | None) -> dict[str, str]:
    """The ranks' variables of a sweep that is resumed. Those that may be secrets were not written down: they are taken
    from `env`, or from this process. Raises LabError for the first that is in neither."""
    manifest = folder.read_manifest()
    known = {**os.environ, **manifest.env, **{name: str(value) for name, value in (env or {}).items()}}
    for name in manifest.env_names:
        if name not in known:
            raise LabError(
                f"the sweep was started with env={{{name!r}: …}}, whose value is not on disk, as it may be a secret. "
                f"Pass it again: sweep.resume(env={{{name!r}: …}})"
            )
    return {name: known[name] for name in {*manifest.env_names, *(env or {})}}


def _prepared(
    script: Script, source: Path | None, options: LaunchOptions, points: list[dict[str, Any]], nodes: Nodes | None
) -> list[Launch]:
    """The launch of every point. The script is checked once for each set of parameters: their names decide about its
    extras, and their values only about its arguments."""
    checked: dict[frozenset[str], Launch] = {}
    launches = []
    for point in points:
        parameters = dict(point)
        own = check_arguments(parameters.pop("args", []))
        args = [*options.args, *own]
        names = frozenset(name for name, value in parameters.items() if value is not None).union(own)
        try:
            if names in checked:
                launch = checked[names].with_arguments(args, parameters)
            else:
                launch = prepare_launch(script, replace(options, args=args), parameters, nodes=nodes, source=source)
                checked[names] = launch
        except ScriptError as error:
            raise _option_meant(script, source, parameters) or error from None
        launches.append(launch)
    return launches


def _option_meant(script: Script, source: Path | None, parameters: Mapping[str, Any]) -> ScriptError | None:
    """An error for a parameter that looks like a mistyped option of the sweep, if there is one."""
    declared = options_of(completed(script, [*parameters]) if source is None else script)
    for name in parameters:
        if name not in declared and (close := get_close_matches(name, SweepOptions.own_names(), n=1)):
            return ScriptError(
                f"neither sweep nor {script.name}.py takes a parameter {name!r}; did you mean {close[0]!r}?"
            )
    return None


def _rungs(script: Script, source: Path | None, options: SweepOptions, points: list[dict[str, Any]]) -> list[int]:
    """The steps of each rung. Raises LabError unless every run can resume what the rung before has trained."""
    declared = options_of(completed(script, ["checkpoint_dir"]) if source is None else script)
    if not {"steps", "checkpoint_dir"} <= declared.keys():
        raise LabError(
            f"halving continues the best points from their checkpoints, so the script must take --steps and "
            f"--checkpoint-dir, as labkit's own do; {script.name}.py takes {', '.join(declared) or 'no options'}"
        )
    totals = {str(point.get("steps")) for point in points}
    steps = points[0].get("steps")
    if len(totals) > 1 or not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise LabError(f"halving needs the same steps=N for all points, those of the last rung; got {sorted(totals)}")
    if any("checkpoint_dir" in point for point in points):
        raise LabError("halving keeps the checkpoints of each point in the sweep's folder; leave checkpoint_dir out")
    return rungs_of(steps, len(points), options.halving or 2)


def _all_save(launches: list[Launch]) -> bool:
    """Whether every point saves checkpoints in a place that the user left to labkit. Raises LabError if two points
    would save in the same place."""
    chosen = [launch.parameters["checkpoint_dir"] for launch in launches if "checkpoint_dir" in launch.parameters]
    if shared := [place for place in chosen if chosen.count(place) > 1]:
        raise LabError(
            f"several points would save their checkpoints in {shared[0]}; leave checkpoint_dir out, and each saves "
            "in its own folder"
        )
    return all(launch.saves_in_run for launch in launches)


@contextmanager
def _starting(folder: SweepFolder) -> Iterator[None]:
    """Let one process at a time start that of a sweep. Raises RunFolderError if the folder is gone or not writable."""
    import fcntl  # missing on native Windows, where the sweep is refused earlier

    try:
        descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunFolderError(f"{folder.path} cannot be written to: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
