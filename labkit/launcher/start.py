"""Start a run: check everything, write its folder, start its supervisor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from labkit.errors import LaunchError, RunFolderError, ScriptError
from labkit.launcher import checks
from labkit.launcher.checkpoint_lock import lock_checkpoints
from labkit.launcher.gpu_lock import check_gpus_are_free, gpus_of, launching
from labkit.launcher.hardware import hardware, platform_name
from labkit.launcher.torchrun import (
    rank_environment,
    recorded_environment,
    reproducing_command,
    script_folder,
    torchrun_command,
)
from labkit.launcher.warm import client as warm
from labkit.launcher.warm.proc import with_room
from labkit.record import RunFolder, State, runs_root, write_state
from labkit.record.folder import write_json
from labkit.record.session import current_folder, seconds_to_train
from labkit.write import Script, check_flags, command_line, completed, options_of, read_back, script_names
from labkit.write.launch_options import LaunchOptions

__all__ = [
    "LaunchRequest",
    "check",
    "check_values",
    "checkpoint_arguments",
    "removed_on_failure",
    "script_and_file",
    "start",
    "with_options",
    "write_folder",
]

CROWDED = 2  # ranks per core above which times mean little
OURS = ("LABKIT_", "KINETO_", "TORCH_FR_", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONSAFEPATH")
# Supervisors this process has started; one that has ended is a zombie until it is polled.
_supervisors: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class LaunchRequest:
    """A script that passed the checks. `path` is the file of a user's own script, which runs from there (`__file__` is
    correct); `argv` are its arguments, `options` the options among them."""

    script: Script
    path: Path | None
    argv: list[str]
    options: dict[str, str]

    def file(self, folder: RunFolder) -> str:
        return str(self.path or folder.script)


def start(
    script: Script | str | os.PathLike[str],
    options: LaunchOptions,
    parameters: Mapping[str, Any],
    *,
    tied: bool,
    shares_gpus: bool = False,
    ends_with_session: bool = True,
    prediction: Mapping[str, Any] | None = None,
    source: Path | None = None,
    sweep: Mapping[str, Any] | None = None,
) -> RunFolder:
    """Start a run and return its folder immediately. Raises LaunchError or ScriptError before creating anything.

    `prediction` is written to the folder before the first rank starts. `ends_with_session`: one of labkit's own scripts
    saves and stops before a Kaggle session ends, unless it was launched with a deadline. `source` is the user's own
    file from which a Script was read, `sweep` the sweep and point that the run belongs to.
    """
    checks.check_torch(platform_name())
    checks.check_environment(options.env or {})
    env = {name: str(value) for name, value in (options.env or {}).items()}
    machine = hardware(env.get("CUDA_VISIBLE_DEVICES"))
    ranks = checks.check_ranks(options.nproc_per_node, options.backend, machine)
    request = check(script, options.args, parameters, ranks, env.get("PYTHONPATH", ""), source=source)
    checks.check_precision(None if request.path else request.options.get("precision"), machine, ranks)
    checks.check_interface({**os.environ, **env}.get("GLOO_SOCKET_IFNAME", ""))
    checks.check_care(options.retries, options.watchdog)
    fewer = _fewer_ranks(options, request, ranks)
    folder = RunFolder.create(runs_root(options.runs_dir), str(options.name or request.script.name))
    deadline = _session_deadline(request) if request.path is None and ends_with_session else {}
    request = with_options(request, deadline)
    extra = [*command_line(request.script, deadline), *checkpoint_arguments(request, deadline, folder)]
    environment, dropped = rank_environment(
        os.environ,
        folder,
        nproc_per_node=ranks,
        cores=machine.cores,
        script_dir=script_folder(request.path),
        extra=env,
    )
    if ranks > CROWDED * machine.cores and not machine.gpus:
        print(f"{ranks} ranks on {machine.cores} cores: they start one after another, and times will mean little")
    gpus = gpus_of(machine, ranks)
    shares_gpus = shares_gpus or environment.get("LABKIT_SHARE_GPUS") == "1"
    with removed_on_failure(folder):
        added = {k: v for k, v in environment.items() if k == "OMP_NUM_THREADS" or os.environ.get(k) != v}
        added = {k: v for k, v in added.items() if not k.startswith(OURS)}
        lines = [reproducing_command(request.file(folder), ranks, request.argv, added)]
        manifest = {
            "torchrun": torchrun_command(folder, ranks, request.file(folder), [*request.argv, *extra]),
            "world_size": ranks,
            "backend": "nccl" if machine.gpus and ranks <= len(machine.gpus) else "gloo",
            "devices": [gpu.name for gpu in machine.gpus] or ["cpu"],
            "platform": machine.platform,
            "env": recorded_environment(environment),
            "env_dropped": dropped,
            "retries": options.retries,
            "fewer_ranks": fewer,
            "watchdog": options.watchdog,
            "gpus": gpus,
            **({"sweep": dict(sweep)} if sweep else {}),
        }
        write_folder(folder, request, [*request.argv, *extra], lines, manifest)
        if prediction:
            write_json(folder.plan, prediction)
        _supervisors[:] = [process for process in _supervisors if process.poll() is None]
        with launching() if gpus else nullcontext():
            if not shares_gpus:
                check_gpus_are_free(gpus)
            with _locked_checkpoints(request, folder) as descriptors:
                owner = os.getpid() if tied else 0
                if not warm.supervise(folder, environment, descriptors, owner=owner):
                    _supervisors.append(_start_supervisor(folder, environment, descriptors, owner=owner))
    warm.prepare(folder, environment)
    return folder


def _fewer_ranks(options: LaunchOptions, request: LaunchRequest, ranks: int) -> list[int]:
    """The numbers of ranks with which a retry may go on, the largest first. Raises LaunchError if `min_ranks` is no
    such number or allows none."""
    least = options.min_ranks
    if least is None:
        return []
    if isinstance(least, bool) or not isinstance(least, int) or not 1 <= least < ranks:
        raise LaunchError(f"min_ranks must be a whole number, 1 or more and fewer than {ranks} ranks, got {least!r}")
    if options.retries < 2:
        raise LaunchError("min_ranks needs retries=2 or more: the first retry has all ranks, the next one fewer")
    if checks.SPLITS_REPLICAS.search(str(request.script)):
        raise LaunchError(
            f"min_ranks is for ranks that each train on a part of the batch (ddp, zero1, zero2, fsdp, fsdp1); those of "
            f"{request.script.name} split one model or sequence"
        )
    fewer = []
    for count in range(ranks - 1, least - 1, -1):
        try:
            checks.check_batch(request.script, request.options, count)
            fewer.append(count)
        except LaunchError as error:
            refused = error
    if not fewer:
        raise LaunchError(f"min_ranks={least} leaves no number of ranks to go on with: {refused}")
    return fewer


@contextmanager
def removed_on_failure(folder: RunFolder) -> Iterator[None]:
    """Remove a folder if filling it fails. Raises RunFolderError for errors of the disk."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(folder.path, ignore_errors=True)  # ours, seconds old, and nothing has run in it
        if isinstance(error, OSError):
            raise RunFolderError(f"the run could not be started in {folder.path}: {error}") from None
        raise


def script_and_file(script: Script | str | os.PathLike[str]) -> tuple[Script, Path | None]:
    """The script, and its file if it is the user's own."""
    if isinstance(script, Script):
        return script, None
    if not isinstance(script, str | os.PathLike):
        raise ScriptError(f"launch takes a Script, the name of one, or a path; got {script!r}")
    if isinstance(script, str) and script in script_names():
        return Script.load(script), None
    path = Path(script).absolute()
    if str(path) != str(path).encode("utf-8", "replace").decode():
        raise ScriptError(f"the path {ascii(str(path))} is not UTF-8 and cannot be recorded; rename the script")
    return Script.load(script), path


def check(
    script: Script | str | os.PathLike[str],
    args: Sequence[Any],
    parameters: Mapping[str, Any],
    ranks: int,
    python_path: str = "",
    *,
    source: Path | None = None,
) -> LaunchRequest:
    """Check a script with its arguments for this number of ranks; one of labkit's own gets the extras that its options
    need. `python_path` is the ranks' PYTHONPATH, `source` the user's own file from which a Script was read. Raises
    LaunchError or ScriptError when it could not train.
    """
    script, path = script_and_file(script)
    path = path or source
    script.check()
    if path is None:
        names = [name for name, value in parameters.items() if value is not None]
        script = _completed(script, names, checks.check_arguments(args))
    checks.check_imports(script, [script_folder(path), *filter(None, python_path.split(os.pathsep))])
    return check_values(script, path, args, parameters, ranks)


def check_values(
    script: Script, path: Path | None, args: Sequence[Any], parameters: Mapping[str, Any], ranks: int
) -> LaunchRequest:
    """Check arguments for a script that has been checked itself. Raises LaunchError or ScriptError."""
    argv = checks.check_arguments([*command_line(script, parameters), *checks.check_arguments(args)])
    if path is None:  # a user's own script may add options in another module
        check_flags(script, argv)
    options = read_back(script, argv)
    if path is None:
        checks.check_numbers(script, options)
    checks.check_batch(script, options, ranks)
    return LaunchRequest(script, path, argv, options)


def _completed(script: Script, names: Sequence[str], args: Sequence[str] = ()) -> Script:
    whole = completed(script, names, args)
    if whole is not script:
        whole.check()
    return whole


def with_options(request: LaunchRequest, options: Iterable[str]) -> LaunchRequest:
    """The request with the extras that declare these options, which the launch sets itself. A user's own file is left
    unchanged, and so is a script whose own cells conflict with the extra's."""
    if request.path is not None:
        return request
    try:
        return replace(request, script=_completed(request.script, list(options)))
    except ScriptError:
        return request


def _session_deadline(request: LaunchRequest) -> dict[str, str]:
    """`deadline_seconds`, if this process runs in a session with a time limit. Prints what the run will do."""
    seconds = seconds_to_train()
    if seconds is None or "deadline_seconds" in request.options:
        return {}
    if "deadline_seconds" not in options_of(with_options(request, ["deadline_seconds"]).script):
        return {}
    print(f"Kaggle's session is limited: this run saves and stops after {seconds:.0f} s (deadline_seconds=0: never)")
    return {"deadline_seconds": f"{seconds:.0f}"}


def checkpoint_arguments(request: LaunchRequest, added: Mapping[str, str], folder: RunFolder) -> list[str]:
    """`--checkpoint-dir` in the run folder, unless the user chose one. `added` are options on top of the request's."""
    values, options = {**request.options, **added}, options_of(request.script)
    saves = any(values.get(option, "0") != "0" for option in ("save_every", "deadline_seconds", "validate_every"))
    if not saves or "checkpoint_dir" in values or "checkpoint_dir" not in options:
        return []
    return ["--checkpoint-dir", str(folder.checkpoints)]


def write_folder(
    folder: RunFolder, request: LaunchRequest, args: list[str], lines: Sequence[str], manifest: Mapping[str, Any]
) -> None:
    """Write the request to the run folder before anything starts. `lines` run the same training without labkit;
    `manifest` holds the fields that depend on the kind of launch."""
    folder.script.write_text(str(request.script), encoding="utf-8")
    folder.ranks.mkdir()
    folder.command.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    write_json(
        folder.manifest,
        {
            "format": 1,
            "id": folder.id,
            "name": request.script.name,
            "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "script": {"sha256": request.script.sha256, "path": str(request.path) if request.path else None},
            "cells": {c.title: {"origin": c.origin} for c in request.script.parts if c.origin},
            "parameters": dict(request.options),
            "args": args,
            "cwd": str(current_folder()),
            "versions": {"python": sys.version.split()[0], "torch": version("torch"), "labkit": version("labkit")},
            "git": _git_commit(),
            **manifest,
        },
    )
    write_state(folder, State("starting", time.time()))


@contextmanager
def _locked_checkpoints(request: LaunchRequest, folder: RunFolder) -> Iterator[tuple[int, ...]]:
    """The lock's file descriptor, which the supervisor holds until it exits."""
    checkpoints = request.options.get("checkpoint_dir")
    descriptor = lock_checkpoints(Path(checkpoints).absolute(), folder) if checkpoints else None
    try:
        yield () if descriptor is None else (descriptor,)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _start_supervisor(
    folder: RunFolder, environment: Mapping[str, str], descriptors: Sequence[int], *, owner: int
) -> subprocess.Popen[bytes]:
    # The environment may hold secrets: it is inherited and never written to disk.
    command = [sys.executable, "-m", "labkit.launcher.supervisor", str(folder.path), str(owner)]
    variables = dict(environment)
    if warm.may_fork(environment):
        command, variables = with_room(command, variables)
    with folder.supervisor_log.open("ab") as log:
        return subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a notebook's interrupt reaches the kernel's whole process group
            pass_fds=descriptors,
        )


def _git_commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
