"""Starts a run: has it checked, writes its folder, starts its supervisor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from labkit.checking import facts_of
from labkit.errors import RunFolderError
from labkit.files import write_json
from labkit.hardware import Hardware, hardware, platform_name
from labkit.launcher import checks
from labkit.launcher.locks import check_gpus_are_free, gpus_of, lock_checkpoints, one_launch_at_a_time
from labkit.launcher.request import (
    Launchable,
    LaunchRequest,
    check,
    checkpoint_arguments,
    fewer_ranks,
    session_deadline,
    with_options,
)
from labkit.launcher.torchrun import (
    rank_environment,
    recorded_environment,
    reproducing_command,
    torchrun_command,
)
from labkit.launcher.warm import session as warm
from labkit.launcher.warm.eligibility import why_new_processes
from labkit.launcher.warm.process import with_room, write_starting_files
from labkit.rank_files import MODULES
from labkit.record import RunFolder, State, record_starting_supervisor, runs_root, write_state
from labkit.session import current_folder
from labkit.version import __version__
from labkit.write import LaunchOptions, command_line

__all__ = [
    "removed_on_failure",
    "start",
    "write_folder",
]

CROWDED = 2  # ranks per core above which times mean little
# Supervisors this process has started; one that has ended is a zombie until it is polled.
_supervisors: list[subprocess.Popen[bytes]] = []


def start(
    script: Launchable,
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
    env = checks.check_environment(options.env or {})
    machine = hardware(env.get("CUDA_VISIBLE_DEVICES"))
    ranks = checks.check_ranks(options.nproc_per_node, options.backend, machine)
    request = check(script, options.args, parameters, ranks, env.get("PYTHONPATH", ""), source=source)
    checks.check_precision(None if request.path else request.options.get("precision"), machine, ranks)
    checks.check_interface({**os.environ, **env}.get("GLOO_SOCKET_IFNAME", ""))
    fewer = fewer_ranks(request, ranks, options)

    folder = RunFolder.create(runs_root(options.runs_dir), str(options.name or request.script.name))
    deadline = session_deadline(request) if request.path is None and ends_with_session else {}
    request = with_options(request, deadline)
    args = [*request.argv, *command_line(request.script, deadline), *checkpoint_arguments(request, deadline, folder)]
    modules = {} if request.path else {MODULES: str(current_folder())}
    environment, dropped = rank_environment(os.environ, modules | env)
    if ranks > CROWDED * machine.cores and not machine.gpus:
        print(f"{ranks} ranks on {machine.cores} cores: they start one at a time, and timings will not be meaningful")
    threads = machine.cores // ranks
    if ranks > 1 and threads > 1 and not machine.gpus and "OMP_NUM_THREADS" not in environment:
        print(f"torchrun gives each rank one thread; to use all cores, pass env={{'OMP_NUM_THREADS': '{threads}'}}")

    if machine.unusable_gpus:
        print(f"this machine has NVIDIA GPUs, but the ranks train on the CPU: {machine.unusable_gpus}")

    gpus = gpus_of(machine, ranks)
    with removed_on_failure(folder):
        manifest = {
            "torchrun": torchrun_command(folder, ranks, request.words(folder), args),
            **_devices_of(machine, ranks),
            "env": recorded_environment(environment),
            "env_dropped": dropped,
            "new_processes": _why_new_processes(request, environment),
            "retries": options.retries,
            "fewer_ranks": fewer,
            "watchdog": options.watchdog,
            "gpus": gpus,
            **({"sweep": dict(sweep)} if sweep else {}),
        }
        lines = [_line_without_labkit(request, folder, ranks, environment)]
        write_folder(folder, request, args, lines, manifest)
        if prediction:
            write_json(folder.plan, prediction)
        with one_launch_at_a_time() if gpus else nullcontext():
            if not shares_gpus and environment.get("LABKIT_SHARE_GPUS") != "1":
                check_gpus_are_free(gpus)
            _supervise(folder, request, environment, owner=os.getpid() if tied else 0)
    warm.prepare(folder, environment)
    return folder


def _why_new_processes(request: LaunchRequest, environment: Mapping[str, str]) -> str | None:
    """Why the ranks are new processes, not forks of one that has imported torch; None if they may be forks."""
    if not warm.may_fork(environment):
        return f"{warm.VARIABLE} is 0, or this system does not support it"
    text, folder = str(request.script), request.path.parent if request.path else current_folder()
    return why_new_processes(request.program or ["script.py"], text, folder, environment)


def _devices_of(machine: Hardware, ranks: int) -> dict[str, Any]:
    """The fields of the manifest about what the ranks run on."""
    return {
        "world_size": ranks,
        "backend": "nccl" if machine.gpus and ranks <= len(machine.gpus) else "gloo",
        "devices": [gpu.name for gpu in machine.gpus] or ["cpu"],
        "platform": machine.platform,
    }


def _line_without_labkit(request: LaunchRequest, folder: RunFolder, ranks: int, environment: Mapping[str, str]) -> str:
    """The command that runs the same training without labkit, with the variables that the launch adds."""
    added = {k: v for k, v in environment.items() if os.environ.get(k) != v}
    return reproducing_command(request.words(folder), ranks, request.argv, added)


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


def write_folder(
    folder: RunFolder, request: LaunchRequest, args: list[str], lines: Sequence[str], manifest: Mapping[str, Any]
) -> None:
    """Write the request to the run folder before anything starts. `lines` run the same training without labkit;
    `manifest` holds the fields that depend on the kind of launch."""
    folder.script.write_bytes(request.script.encoded())
    write_starting_files(folder)
    folder.ranks.mkdir()
    folder.command.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    write_json(
        folder.manifest,
        {
            "format": 1,
            "id": folder.id,
            "folder": str(folder.path),
            "name": request.script.name,
            "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "script": {"sha256": request.script.sha256, "path": request.file},
            "program": request.words(folder),
            "cells": {c.title: {"origin": c.origin} for c in request.script.parts if c.origin},
            "parameters": dict(request.options),
            "facts": asdict(facts) if (facts := facts_of(str(request.script))) else None,
            "args": args,
            "cwd": str(current_folder()),
            "versions": {"python": sys.version.split()[0], "torch": version("torch"), "labkit": __version__},
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


def _supervise(folder: RunFolder, request: LaunchRequest, environment: Mapping[str, str], *, owner: int) -> None:
    """Start the run's supervisor: a fork of the session's warm process if it fits, else a new process."""
    _supervisors[:] = [process for process in _supervisors if process.poll() is None]
    with _locked_checkpoints(request, folder) as descriptors:
        if not warm.supervise(folder, environment, descriptors, owner=owner):
            _supervisors.append(_start_supervisor(folder, environment, descriptors, owner=owner))


def _start_supervisor(
    folder: RunFolder, environment: Mapping[str, str], descriptors: Sequence[int], *, owner: int
) -> subprocess.Popen[bytes]:
    # The environment may hold secrets: it is inherited and never written to disk.
    command = [sys.executable, "-u", str(folder.outermost), "labkit.launcher.supervisor", str(folder.path), str(owner)]
    variables = dict(environment)
    if warm.may_fork(environment):
        command, variables = with_room(command, variables)
    with folder.supervisor_log.open("ab") as log:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a notebook's interrupt reaches the kernel's whole process group
            pass_fds=descriptors,
        )
    record_starting_supervisor(folder, process.pid)
    return process


def _git_commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
