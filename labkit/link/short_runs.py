"""Runs one of labkit's own scripts on real ranks for a few seconds, and returns the answer that it wrote.

Answers are stored per machine in the user's cache, under a key that names everything they depend on.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from labkit.errors import LabError
from labkit.files import read_json, write_json
from labkit.hardware import Hardware, driver_version
from labkit.host import host_name
from labkit.launcher import start, stop
from labkit.record import read_state
from labkit.write import LaunchOptions

__all__ = ["load", "machine_key", "short_run", "store"]

POLL_SECONDS = 0.1


def short_run(
    script: Path,
    ranks: int,
    backend: str,
    *,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    seconds: float,
) -> tuple[Any, str]:
    """`(answer, problem)`: what the ranks wrote to the file whose path follows `args`, and the error, empty if there is
    none. The run is stopped after `seconds` without progress; nothing is left running."""
    with tempfile.TemporaryDirectory(prefix="labkit-") as scratch:
        answer = Path(scratch, "answer.json")
        try:
            options = LaunchOptions(
                nproc_per_node=ranks,
                backend="gloo" if backend == "gloo" else None,
                args=[*args, answer],
                name=script.stem,
                runs_dir=scratch,
                env=env,
                watchdog=seconds,
            )
            folder = start(script, options, {}, tied=True, shares_gpus=True)
        except LabError as error:
            return None, str(error)
        try:
            while not (state := read_state(folder)).is_final:
                time.sleep(POLL_SECONDS)
        except BaseException:  # also on an interrupt, leave nothing running
            stop(folder, grace=0.0)
            raise
        if state.state != "succeeded":
            return None, str((state.cause or {}).get("sentence", state.state))
        content = read_json(answer)
        return (content, "") if content is not None else (None, "the ranks wrote no result")


def machine_key(machine: Hardware, ranks: int, backend: str) -> str:
    """A key with everything that the answer of a machine's ranks depends on. It names the host, because several may
    share a home folder."""
    devices = ",".join(gpu.name for gpu in machine.gpus) or "cpu"
    driver = f", driver {driver_version()}" if machine.gpus else ""
    visible = machine.visible_devices or "all"
    return f"{host_name()}: {backend} {ranks} of {devices} ({visible}){driver}, torch {version('torch')}"


def load(name: str, key: str) -> Any:
    """The value stored under this key; None if there is none."""
    values = read_json(_file(name))
    return values.get(key) if isinstance(values, dict) else None


def store(name: str, key: str, value: Any) -> None:
    """Store a value next to the others."""
    file = _file(name)
    values = read_json(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, (values if isinstance(values, dict) else {}) | {key: value})
    except OSError:
        pass  # a cache that cannot be written costs time, nothing else


def _file(name: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "labkit", f"{name}.json")
