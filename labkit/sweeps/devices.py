"""Decides how many runs of a sweep fit this machine at a time, and on which GPUs the next one starts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labkit.errors import LaunchError
from labkit.hardware import hardware
from labkit.launcher import busy_gpus, check_ranks

SHARE = "LABKIT_SHARE_GPUS"


@dataclass(frozen=True)
class Room:
    """`ranks` of each run, `at_once` runs at a time, `gpus` as `CUDA_VISIBLE_DEVICES` names them (empty on the CPU),
    `gpus_each` of them for a run, and `threads` of each rank."""

    ranks: int
    at_once: int
    gpus: tuple[str, ...]
    gpus_each: int
    threads: int
    shared: bool = False

    def free_gpus(self) -> list[str] | None:
        """The GPUs for the next run; None if too few are free. Runs that are not of the sweep hold theirs, too."""
        if not self.gpus:
            return []
        return chosen(self.gpus, busy_gpus(self.gpus), self.gpus_each, self.shared)

    def environment(self, gpus: Sequence[str]) -> dict[str, str]:
        """The variables of a run on these GPUs. Runs share the cores, so each gets its part of the threads."""
        threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(self.threads)}
        return threads | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def room_for(nproc_per_node: int | str, backend: str | None, at_once: int | None, env: Mapping[str, str]) -> Room:
    """What fits this machine. Raises LaunchError when one run does not fit, or not `at_once` of them."""
    machine = hardware(env.get("CUDA_VISIBLE_DEVICES"))
    ranks = check_ranks(nproc_per_node, backend, machine)
    gpus = tuple(machine.gpu_names(len(machine.gpus)))
    each = min(ranks, len(gpus))
    shared = {**os.environ, **env}.get(SHARE) == "1"
    fitting = max(1, len(gpus) // each if gpus else machine.cores // ranks)
    if gpus and at_once is not None and at_once > fitting and not shared:
        raise LaunchError(
            f"at_once={at_once} runs of {each} GPU{'s' * (each > 1)} each need {at_once * each} GPUs; this machine has "
            f"{len(gpus)}, enough for {fitting}. Leave at_once out, or let runs share GPUs: env={{'{SHARE}': '1'}}"
        )
    at_once = at_once or fitting
    return Room(ranks, at_once, gpus, each, max(1, machine.cores // (at_once * ranks)), shared)


def chosen(gpus: Sequence[str], busy: Sequence[str], each: int, shared: bool) -> list[str] | None:
    """`each` GPUs that no run holds, or, if they are shared, those that the fewest runs hold; None if too few are free.

    >>> chosen(["0", "1", "2"], ["0"], 2, False)
    ['1', '2']
    """
    runs = Counter(busy)
    candidates = sorted(gpus, key=lambda gpu: runs[gpu]) if shared else [gpu for gpu in gpus if not runs[gpu]]
    return sorted(candidates[:each], key=list(gpus).index) if len(candidates) >= each else None
