"""Measures the host memory of the ranks whose DataLoaders have workers, for the sampler, from outside.

Of memory that processes share, each counts its part (PSS), so that their sum is what they take together. A forked
worker shares its rank's memory until one of them writes to it, and reading a Python object writes its reference count.
Such a write copies a page: the worker's private memory becomes larger and its resident set does not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from labkit.files import read_object
from labkit.launcher.rank_processes import loader_workers
from labkit.record import RunFolder

PERIOD_SECONDS = 2.0
REST = 30  # times as long as a reading takes, which is about 20 ms per GiB of resident set
TOGETHER_SECONDS = 5.0  # workers that were started within this time are those of one loader
FIELD = re.compile(r"^(Rss|Pss|Private_Clean|Private_Dirty): +(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True)
class Memory:
    """One process, in bytes; `private` is what it shares with no other one."""

    resident: int
    proportional: int
    private: int

    @classmethod
    def of(cls, pid: int) -> Memory:
        """Raises OSError if the process has exited, or the system does not say."""
        sizes = {name: int(size) << 10 for name, size in FIELD.findall(Path(f"/proc/{pid}/smaps_rollup").read_text())}
        return cls(sizes["Rss"], sizes["Pss"], sizes["Private_Clean"] + sizes["Private_Dirty"])


class LoaderMemory:
    """`home` is the folder of the supervisor in whose ranks it looks, `run` the run's."""

    def __init__(self, run: RunFolder, home: RunFolder):
        self._run, self._home = run, home
        self._ranks: dict[int, int] = {}  # their pids
        self._least: dict[int, Memory] = {}  # by the rank's pid, of the worker that had the least memory of its own
        self._due = 0.0

    def read(self, processes: Collection[psutil.Process]) -> dict[str, dict[str, int]]:
        """The memory of each rank that has workers now, if it is time to look: its own, that of its workers, and how
        much of the memory that they shared they have copied. `processes` are the supervisor's descendants."""
        workers, used = dict(loader_workers(processes)), time.process_time()
        is_first = any(parents.isdisjoint(self._least) for parents in workers.values())  # their memory is still shared
        if time.monotonic() < self._due and not is_first:
            return {}
        if any(parents.isdisjoint(self._ranks.values()) for parents in workers.values()):
            self._ranks = self._pids()
        read: dict[str, dict[str, int]] = {}
        for rank, pid in self._ranks.items():
            own = [worker for worker, parents in workers.items() if pid in parents]
            with suppress(OSError, KeyError, psutil.Error):  # one has exited; macOS and old kernels do not say
                read |= {str(rank): self._memory(pid, own)} if own else {}
        self._due = time.monotonic() + max(PERIOD_SECONDS, REST * (time.process_time() - used))
        return read

    def _pids(self) -> dict[int, int]:
        """The pids of the newest attempt's ranks, on several nodes of this one's."""
        attempt, nodes = self._run.attempts()[-1], self._run.glimpsed_manifest().nodes
        ranks: Iterable[int] = nodes.ranks_of(int(self._home.path.name)) if nodes else attempt.started_ranks()
        pids = {rank: read_object(attempt.heartbeat(rank)).get("pid") for rank in ranks}
        return {rank: pid for rank, pid in pids.items() if isinstance(pid, int)}

    def _memory(self, rank: int, workers: Collection[psutil.Process]) -> dict[str, int]:
        each = [Memory.of(worker.pid) for worker in workers]
        least = self._least[rank] = min([*each, self._least.get(rank, each[0])], key=lambda memory: memory.private)
        started = [worker.create_time() for worker in workers]
        # What only a rank writes becomes private to a worker, too, unless another one was forked with it.
        is_shared = len(each) > 1 and max(started) - min(started) < TOGETHER_SECONDS
        return {
            "rank": Memory.of(rank).proportional,
            "workers": len(each),
            "workers_pss": sum(memory.proportional for memory in each),
            "copied": sum(_copied(least, memory) for memory in each) if is_shared else 0,
        }


def _copied(least: Memory, memory: Memory) -> int:
    """The bytes that a worker has copied at least, by comparison with one that had hardly begun. One that is smaller
    than that one was forked from a rank that held less: then it is unknown."""
    larger = memory.resident - least.resident
    return max(0, memory.private - least.private - larger) if larger >= 0 else 0
