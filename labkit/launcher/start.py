"""Begin a run: check everything, write its folder, start its supervisor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from labkit.errors import RunFolderError
from labkit.launcher import checks
from labkit.launcher.hardware import Hardware, hardware, platform_name
from labkit.launcher.torchrun import (
    rank_environment,
    recorded_environment,
    reproducing_command,
    script_folder,
    torchrun_command,
)
from labkit.record import RunFolder, State, runs_root, write_state
from labkit.record.folder import write_json
from labkit.write import Script, check_arguments, command_line, options_of, script_names

__all__ = ["start"]

# Supervisors of tied runs. Their standard input is a pipe whose other end this process must hold until it dies:
# were it only in a Run object, collecting the object would end the run.
_supervisors: dict[str, subprocess.Popen[bytes]] = {}


def start(
    script: Script | str | os.PathLike[str],
    *,
    nproc_per_node: int | str,
    backend: str | None,
    args: Sequence[Any],
    parameters: Mapping[str, Any],
    name: str | None,
    runs_dir: str | os.PathLike[str] | None,
    env: Mapping[str, str] | None,
    tied: bool,
) -> RunFolder:
    """Start a run and return its folder at once. Raises LaunchError or ScriptError before anything exists."""
    checks.check_torch(platform_name())
    script, path = _script(script)
    visible = (env or {}).get("CUDA_VISIBLE_DEVICES")
    machine = hardware(None if visible is None else str(visible))
    ranks = checks.check_ranks(nproc_per_node, backend, machine)
    script.check()
    checks.check_imports(script, script_folder(path))
    argv = checks.check_text([*command_line(script, parameters), *args])
    if path is None:  # a user's own script may add options in another module
        check_arguments(script, argv)
    checks.check_batch(script, parameters, ranks)
    folder = RunFolder.create(runs_root(runs_dir), name or script.name)
    argv += _checkpoint_arguments(script, parameters, argv, folder)
    environment, dropped = rank_environment(
        os.environ,
        folder,
        nproc_per_node=ranks,
        cores=machine.cores,
        script_dir=script_folder(path),
        extra={name: str(value) for name, value in (env or {}).items()},
    )
    try:
        _write_folder(folder, script, path, ranks, argv, parameters, environment, dropped, machine)
        for ended in [run for run, process in _supervisors.items() if process.poll() is not None]:
            del _supervisors[ended]
        _supervisors[folder.id] = _start_supervisor(folder, environment, tied=tied)
    except OSError as error:
        shutil.rmtree(folder.path, ignore_errors=True)  # ours, seconds old, and nothing ran
        raise RunFolderError(f"the run could not be started in {folder.path}: {error}") from None
    return folder


def _script(script: Script | str | os.PathLike[str]) -> tuple[Script, Path | None]:
    """The script, and the file it must run from when it is the user's own: `__file__` has to stay true."""
    if isinstance(script, Script):
        return script, None
    if isinstance(script, str) and script in script_names():
        return Script.load(script), None
    return Script.load(script), Path(script).absolute()


def _checkpoint_arguments(
    script: Script, parameters: Mapping[str, Any], argv: Sequence[str], folder: RunFolder
) -> list[str]:
    """Checkpoints go into the run folder unless the user said where."""
    given = any(arg.startswith("--checkpoint-dir") for arg in argv)
    if given or not parameters.get("save_every") or "checkpoint_dir" not in options_of(script):
        return []
    return ["--checkpoint-dir", str(folder.checkpoints)]


def _write_folder(
    folder: RunFolder,
    script: Script,
    path: Path | None,
    ranks: int,
    argv: list[str],
    parameters: Mapping[str, Any],
    environment: Mapping[str, str],
    dropped: list[str],
    machine: Hardware,
) -> None:
    folder.script.write_text(str(script), encoding="utf-8")
    folder.ranks.mkdir()
    file = str(path or folder.script)
    given = {k: v for k, v in environment.items() if k == "OMP_NUM_THREADS" or os.environ.get(k) != v}
    given = {k: v for k, v in given.items() if not k.startswith(("LABKIT_", "PYTHON"))}
    folder.command.write_text(reproducing_command(file, ranks, argv, given) + "\n", encoding="utf-8")
    write_json(
        folder.manifest,
        {
            "format": 1,
            "id": folder.id,
            "name": script.name,
            "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "script": {"sha256": script.sha256, "path": str(path) if path else None},
            "cells": {c.title: {"origin": c.origin} for c in script.parts if c.origin},
            "parameters": {k: v if isinstance(v, int | float | None) else str(v) for k, v in parameters.items()},
            "args": argv,
            "torchrun": torchrun_command(folder, ranks, file, argv),
            "world_size": ranks,
            "backend": "nccl" if machine.gpus and ranks <= len(machine.gpus) else "gloo",
            "devices": [gpu.name for gpu in machine.gpus] or ["cpu"],
            "versions": {"python": sys.version.split()[0], "torch": version("torch"), "labkit": version("labkit")},
            "platform": machine.platform,
            "git": _git_commit(),
            "env": recorded_environment(environment),
            "env_dropped": dropped,
        },
    )
    write_state(folder, State("starting", time.time()))


def _start_supervisor(folder: RunFolder, environment: Mapping[str, str], *, tied: bool) -> subprocess.Popen[bytes]:
    # The environment, which may hold secrets, is inherited and never written down.
    with folder.supervisor_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "labkit.launcher.supervisor", str(folder.path), *(["--tied"] if tied else [])],
            env=dict(environment),
            stdin=subprocess.PIPE if tied else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a notebook's interrupt reaches the kernel's whole process group
        )


def _git_commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
