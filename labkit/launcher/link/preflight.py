"""Can the ranks of this machine reach each other? One small all-reduce, tried with the settings that are known to help.

What worked is kept per machine, so that it is asked once: NCCL between consumer GPUs, in WSL2 and in containers may
hang in silence, and the cure is nearly always one of the same few variables (see NCCL's list of them).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from labkit.errors import LaunchError
from labkit.launcher import checks
from labkit.launcher.hardware import Hardware, hardware
from labkit.launcher.link.short_run import keep, kept, machine_key, short_run

__all__ = ["Preflight", "preflight", "remembered", "settings_for"]

HANDSHAKE = Path(__file__).with_name("handshake.py")
RUNG_SECONDS = 45.0  # start-up of the ranks included
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
    try:
        checks.check_interface({**os.environ, **(env or {})}.get("GLOO_SOCKET_IFNAME", ""))
    except LaunchError as error:  # the shell's fault: it says nothing of the machine that would be worth keeping
        return Preflight(backend, None, [], [{"env": {}, "problem": str(error)}], None, time.time())
    tried: list[dict[str, Any]] = []
    for rung in NCCL_LADDER if backend == "nccl" else ({},):
        said, problem = short_run(
            HANDSHAKE, ranks, backend, args=[backend], env={**(env or {}), **rung}, seconds=seconds
        )
        if not problem:
            found = Preflight(backend, rung, said["ranks"], tried, said["all_reduce_seconds"], time.time())
            break
        tried.append({"env": rung, "problem": problem})
    else:
        found = Preflight(backend, None, [], tried, None, time.time())
    keep("preflight", machine_key(machine, ranks, backend), asdict(found))
    return found


def remembered(machine: Hardware, ranks: int, backend: str) -> Preflight | None:
    """What this machine answered before, as long as its GPUs and torch are the same."""
    known = kept("preflight", machine_key(machine, ranks, backend))
    try:
        return Preflight(**known) if isinstance(known, dict) else None
    except TypeError:
        return None


def _assignments(env: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in env.items())
