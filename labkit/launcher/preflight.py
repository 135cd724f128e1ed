"""Can the ranks of this machine reach each other? One small all-reduce, tried with the settings that are known to help.

What worked is kept per machine, so that it is asked once: NCCL between consumer GPUs, in WSL2 and in containers may
hang in silence, and the cure is nearly always one of the same few variables (see NCCL's list of them).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from labkit.errors import LabError, LaunchError
from labkit.launcher import checks
from labkit.launcher.hardware import Hardware, hardware
from labkit.launcher.start import start
from labkit.launcher.stop import stop
from labkit.record import read_state
from labkit.record.folder import read_json, write_json

__all__ = ["Preflight", "preflight", "remembered", "settings_for"]

HANDSHAKE = Path(__file__).with_name("handshake.py")
RUNG_SECONDS = 45.0  # start-up of the ranks included
LOOK_SECONDS = 0.1
NCCL_LADDER: tuple[dict[str, str], ...] = (
    {},
    {"NCCL_P2P_DISABLE": "1"},
    {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
)


@dataclass(frozen=True)
class Preflight:
    """What the ranks of one machine can do. `env` is the setting they needed, None when none helped; `tried` holds
    `env` and `problem` of those that did not. `ranks` has each one's `host`, `device` and `uuid`."""

    backend: str
    env: dict[str, str] | None
    ranks: list[dict[str, Any]] = field(default_factory=list)
    tried: list[dict[str, Any]] = field(default_factory=list)
    all_reduce_seconds: float | None = None
    when: float = 0.0

    def __str__(self) -> str:
        if self.env is None:
            return f"{self.backend} does not work between the ranks: {self.tried[-1]['problem']}"
        needed = f" with {_assignments(self.env)}" if self.env else ""
        where = ", ".join(f"rank {rank['rank']} {rank['device']} on {rank['host']}" for rank in self.ranks)
        return f"{len(self.ranks)} ranks sum over {self.backend}{needed}: {where}"


def settings_for(nproc_per_node: int | str, backend: str | None, env: Mapping[str, str] | None) -> dict[str, str]:
    """The variables that this many ranks need here to reach each other over NCCL, asked of the machine once.

    Empty for one rank and on gloo, which has no such trouble. Raises LaunchError when NCCL works with none of them.
    """
    checks.check_environment(env or {})
    given = (env or {}).get("CUDA_VISIBLE_DEVICES")
    machine = hardware(None if given is None else str(given))
    ranks = checks.check_ranks(nproc_per_node, backend, machine)
    if ranks < 2 or backend == "gloo" or ranks > len(machine.gpus):
        return {}
    known = remembered(machine, ranks, "nccl")
    if known is None:
        print(
            f"first launch on these {ranks} GPUs: asking whether they reach each other (once per machine)", flush=True
        )
        known = preflight(machine, ranks, "nccl", env=env)
    if known.env is None:
        tried = "; ".join(f"{_assignments(t['env']) or 'as it is'}: {t['problem']}" for t in known.tried)
        raise LaunchError(
            f"the {ranks} GPUs of this machine cannot sum a number over NCCL ({tried}). Use nproc_per_node=1, or look "
            "at the driver; `labkit doctor --preflight` asks again"
        )
    return known.env


def preflight(
    machine: Hardware, ranks: int, backend: str, *, env: Mapping[str, str] | None = None, seconds: float = RUNG_SECONDS
) -> Preflight:
    """Let so many ranks meet and sum, down the ladder of settings until it works; keep the result.

    Takes some five seconds when all is well, at most `seconds` per rung. Nothing is left running.
    """
    tried: list[dict[str, Any]] = []
    for rung in NCCL_LADDER if backend == "nccl" else ({},):
        with tempfile.TemporaryDirectory(prefix="labkit-preflight-") as scratch:
            answer = Path(scratch, "answer.json")
            problem = _try(ranks, backend, answer, scratch, {**(env or {}), **rung}, seconds)
            said = read_json(answer)
        if not problem and isinstance(said, dict):
            found = Preflight(backend, rung, said["ranks"], tried, said["all_reduce_seconds"], time.time())
            break
        tried.append({"env": rung, "problem": problem or "the ranks left no answer"})
    else:
        found = Preflight(backend, None, [], tried, None, time.time())
    _remember(machine, ranks, found)
    return found


def _try(ranks: int, backend: str, answer: Path, scratch: str, env: dict[str, str], seconds: float) -> str:
    """One run of the handshake; empty, or what was wrong."""
    try:
        folder = start(
            HANDSHAKE, nproc_per_node=ranks, backend="gloo" if backend == "gloo" else None, args=[backend, answer],
            parameters={}, name="preflight", runs_dir=scratch, env=env, watchdog=seconds, tied=True, shares_gpus=True,
        )  # fmt: skip
    except LabError as error:
        return str(error)
    try:
        while not (state := read_state(folder)).is_final:
            time.sleep(LOOK_SECONDS)
    except BaseException:  # an interrupt: nothing of it may stay behind
        stop(folder, grace=0.0)
        raise
    return "" if state.state == "succeeded" else str((state.cause or {}).get("sentence", state.state))


def remembered(machine: Hardware, ranks: int, backend: str) -> Preflight | None:
    """What this machine answered before, as long as its GPUs and torch are the same."""
    kept = (read_json(_file()) or {}).get(_key(machine, ranks, backend))
    try:
        return Preflight(**kept) if isinstance(kept, dict) else None
    except TypeError:
        return None


def _remember(machine: Hardware, ranks: int, found: Preflight) -> None:
    file = _file()
    kept = read_json(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        key = _key(machine, ranks, found.backend)
        write_json(file, (kept if isinstance(kept, dict) else {}) | {key: asdict(found)})
    except OSError:
        pass  # asked again next time


def _key(machine: Hardware, ranks: int, backend: str) -> str:
    devices = ",".join(gpu.name for gpu in machine.gpus) or "cpu"
    return f"{backend} {ranks} of {devices} ({machine.visible_devices or 'all'}), torch {version('torch')}"


def _file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "labkit", "preflight.json")


def _assignments(env: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in env.items())
