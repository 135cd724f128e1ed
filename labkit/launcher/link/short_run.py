"""A script of labkit's own as real ranks for a few seconds, and what it wrote as its answer; kept per machine.

What is asked of a machine once is remembered in the user's cache, under a key that names all it depends on.
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
from labkit.launcher.hardware import Hardware
from labkit.launcher.start import start
from labkit.launcher.stop import stop
from labkit.record import read_state
from labkit.record.folder import read_json, write_json
from labkit.write.launch_options import LaunchOptions

__all__ = ["keep", "kept", "machine_key", "short_run"]

LOOK_SECONDS = 0.1


def short_run(
    script: Path,
    ranks: int,
    backend: str,
    *,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    seconds: float,
) -> tuple[Any, str]:
    """`(answer, problem)`: what the ranks wrote into the file they are given as the argument after `args`, and what
    was wrong, empty when nothing was. Over after `seconds` without a sign of life; nothing is left running."""
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
                time.sleep(LOOK_SECONDS)
        except BaseException:  # an interrupt: nothing of it may stay behind
            stop(folder, grace=0.0)
            raise
        if state.state != "succeeded":
            return None, str((state.cause or {}).get("sentence", state.state))
        said = read_json(answer)
        return (said, "") if said is not None else (None, "the ranks left no answer")


def machine_key(machine: Hardware, ranks: int, backend: str) -> str:
    """What the ranks of a machine can do depends on these."""
    devices = ",".join(gpu.name for gpu in machine.gpus) or "cpu"
    return f"{backend} {ranks} of {devices} ({machine.visible_devices or 'all'}), torch {version('torch')}"


def kept(what: str, key: str) -> Any:
    """What was kept under this key; None if nothing was."""
    found = read_json(_file(what))
    return found.get(key) if isinstance(found, dict) else None


def keep(what: str, key: str, value: Any) -> None:
    """Remember it beside what else there is. Where nothing can be written it is asked again next time."""
    file = _file(what)
    found = read_json(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, (found if isinstance(found, dict) else {}) | {key: value})
    except OSError:
        pass


def _file(what: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "labkit", f"{what}.json")
