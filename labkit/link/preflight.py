"""Tests whether the ranks of this machine reach each other: sums, messages and a split group, with settings known to
help.

The settings that worked are stored, so that this runs once per machine. NCCL may hang silently between consumer GPUs,
in WSL2 and in containers, and nearly always one of the same few variables helps (see NCCL's list of them).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from labkit.errors import LaunchError
from labkit.hardware import Hardware, hardware
from labkit.launcher import check_environment, check_interface, check_ranks
from labkit.link.short_runs import load, machine_key, short_run, store

__all__ = ["Preflight", "try_link", "remembered_preflight", "link_settings"]

HANDSHAKE = Path(__file__).with_name("handshake.py")
RUNG_SECONDS = 45.0  # including the start-up of the ranks
NCCL_LADDER: tuple[dict[str, str], ...] = (
    {},
    {"NCCL_P2P_DISABLE": "1"},
    {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
)


@dataclass(frozen=True)
class Preflight:
    """Whether the ranks of one machine reach each other. `env` is the setting that worked, None if none did; `tried`
    holds `env` and `problem` of those that did not. `ranks` has each rank's `host`, `device` and `uuid`."""

    backend: str
    env: dict[str, str] | None
    ranks: list[dict[str, Any]] = field(default_factory=list)
    tried: list[dict[str, Any]] = field(default_factory=list)
    all_reduce_seconds: float | None = None
    when: float = 0.0

    def __str__(self) -> str:
        if self.env is None:
            return f"{self.backend} does not work between the ranks: {self.tried[-1]['problem']}"
        setting = f" with {_assignments(self.env)}" if self.env else ""
        where = ", ".join(f"rank {rank['rank']} {rank['device']} on {rank['host']}" for rank in self.ranks)
        return f"{len(self.ranks)} ranks communicate over {self.backend}{setting}: {where}"


def link_settings(nproc_per_node: int | str, backend: str | None, env: Mapping[str, str] | None) -> dict[str, str]:
    """The variables that this many ranks need to reach each other over NCCL. What works is remembered for this machine.

    Empty for one rank and on gloo, which needs none. Raises LaunchError when NCCL works with none of them.
    """
    check_environment(env or {})
    visible = (env or {}).get("CUDA_VISIBLE_DEVICES")
    machine = hardware(None if visible is None else str(visible))
    ranks = check_ranks(nproc_per_node, backend, machine)
    if ranks < 2 or backend == "gloo" or ranks > len(machine.gpus):
        return {}
    known = remembered_preflight(machine, ranks, "nccl")
    if known is None or known.env is None:  # what failed may have lacked only memory
        print(f"testing NCCL between these {ranks} GPUs; settings that work are remembered", flush=True)
        known = try_link(machine, ranks, "nccl", env=env)
    if known.env is None:
        tried = "; ".join(f"{_assignments(t['env']) or 'defaults'}: {t['problem']}" for t in known.tried)
        raise LaunchError(
            f"NCCL does not work between the {ranks} GPUs of this machine ({tried}). Use nproc_per_node=1, or check "
            "the driver. The next launch tries again"
        )
    return known.env


def try_link(
    machine: Hardware, ranks: int, backend: str, *, env: Mapping[str, str] | None = None, seconds: float = RUNG_SECONDS
) -> Preflight:
    """Let this many ranks sum a number, with one setting after another until it works, and store the result.

    Takes about 5 seconds when the first setting works, at most `seconds` per setting. Nothing is left running.
    """
    try:
        check_interface({**os.environ, **(env or {})}.get("GLOO_SOCKET_IFNAME", ""))
    except LaunchError as error:  # caused by the shell's environment, so not stored for the machine
        return Preflight(backend, None, [], [{"env": {}, "problem": str(error)}], None, time.time())
    tried: list[dict[str, Any]] = []
    for rung in NCCL_LADDER if backend == "nccl" else ({},):
        answer, problem = short_run(
            HANDSHAKE, ranks, backend, args=[backend], env={**(env or {}), **rung}, seconds=seconds
        )
        if not problem:
            result = Preflight(backend, rung, answer["ranks"], tried, answer["all_reduce_seconds"], time.time())
            break
        tried.append({"env": rung, "problem": problem})
    else:
        result = Preflight(backend, None, [], tried, None, time.time())
    store("try_link", machine_key(machine, ranks, backend), asdict(result))
    return result


def remembered_preflight(machine: Hardware, ranks: int, backend: str) -> Preflight | None:
    """The stored result of this machine, if its GPUs and torch are still the same."""
    stored = load("try_link", machine_key(machine, ranks, backend))
    try:
        return Preflight(**stored) if isinstance(stored, dict) else None
    except TypeError:
        return None


def _assignments(env: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in env.items())
