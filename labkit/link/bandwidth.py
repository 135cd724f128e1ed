"""Measures the link between this machine's ranks: latency and bandwidth of each kind of collective.

The model of a message is latency + bytes / bandwidth (Hockney 1994; nccl-tests' doc/PERFORMANCE.md uses it for
collectives). On gloo a collective also takes CPU time away from the ranks' computation, which is measured, too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.errors import LaunchError
from labkit.hardware import Hardware, hardware
from labkit.launcher import check_ranks
from labkit.link.preflight import remembered_preflight
from labkit.link.short_runs import load, machine_key, short_run, store

__all__ = ["KINDS", "CollectiveTime", "Link", "fit", "measure_link", "remembered_link", "remembered_links"]

COLLECTIVES = Path(__file__).with_name("collective_times.py")
LIMIT_SECONDS = 60.0
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


@dataclass(frozen=True)
class CollectiveTime:
    """Seconds of one call on an array of `bytes`: `latency` + `per_byte` x bytes, within a factor 1 +- `residual` (root
    mean square of the relative errors). `cpu` is the core-seconds per byte that it takes on each rank."""

    latency: float
    per_byte: float
    residual: float
    cpu: float = 0.0

    def seconds(self, bytes: float, calls: int = 1) -> float:
        """Seconds of `calls` calls on `bytes` bytes in total."""
        return self.latency * calls + self.per_byte * bytes

    def __str__(self) -> str:
        return f"{self.latency * 1e6:,.0f} us + {1e-9 / self.per_byte:.3g} GB/s" if self.per_byte else "latency only"


@dataclass(frozen=True)
class Link:
    """The link between `ranks` ranks of a machine. `kinds` has a CollectiveTime for each of KINDS; `when` is seconds
    since the epoch. `sharding` is FSDP's overhead per rank besides waiting, in seconds: (per unit and step, per byte
    gathered or scattered).
    """

    backend: str
    ranks: int
    kinds: Mapping[str, CollectiveTime]
    when: float = 0.0
    sharding: tuple[float, float] = (0.0, 0.0)


def fit(measured: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """(latency, seconds per byte, residual) of `(bytes, seconds)`: least squares of the relative errors, so that 4 KiB
    count as much as 64 MiB. Latency and seconds per byte are at least 0."""
    rows = [(1 / s, b / s) for b, s in measured]  # latency x a + per_byte x b = 1
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(r[0] for r in rows), sum(r[1] for r in rows)
    determinant = aa * bb - ab * ab
    latency, per_byte = (
        ((a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant) if determinant else (0, b / bb)
    )
    if latency < 0:
        latency, per_byte = 0.0, b / bb
    elif per_byte < 0:
        latency, per_byte = a / aa, 0.0
    errors = [(latency * r[0] + per_byte * r[1] - 1) ** 2 for r in rows]
    return latency, per_byte, (sum(errors) / len(errors)) ** 0.5


def measure_link(ranks: int | None = None, *, machine: Hardware | None = None) -> Link:
    """Run each kind of collective on this number of ranks (by default one per GPU, or two) and store the result. Takes
    about 10 seconds. Raises LaunchError if it fails."""
    machine = machine or hardware()
    ranks = check_ranks(machine.default_ranks if ranks is None else ranks, None, machine)
    if ranks < 2:
        raise LaunchError(f"bandwidth is measured between 2 or more ranks, got {ranks}")
    backend = machine.backend
    preflight = remembered_preflight(machine, ranks, backend)
    answer, problem = short_run(
        COLLECTIVES, ranks, backend, args=[backend], env=preflight.env if preflight else None, seconds=LIMIT_SECONDS
    )
    if problem:
        raise LaunchError(f"the bandwidth between {ranks} ranks could not be measured: {problem}")
    kinds = {kind: _line(kind, answer["kinds"]) for kind in KINDS}
    link = Link(backend, ranks, kinds, time.time(), (*answer["sharding"],))
    store("bandwidth", machine_key(machine, ranks, backend), asdict(link))
    return link


def remembered_link(machine: Hardware, ranks: int, backend: str) -> Link | None:
    """The stored measurement for this number of ranks, if the GPUs and torch are still the same."""
    stored = load("bandwidth", machine_key(machine, ranks, backend))
    try:
        return (
            Link(
                **{
                    **stored,
                    "kinds": {kind: CollectiveTime(**stored["kinds"][kind]) for kind in KINDS},
                    "sharding": (*stored["sharding"],),
                }
            )
            if stored
            else None
        )
    except (TypeError, KeyError, AttributeError):
        return None


def remembered_links(machine: Hardware) -> list[Link]:
    """The stored measurements of this machine for all numbers of ranks, fewest first."""
    counts = range(2, max(2 * machine.cores, len(machine.gpus), machine.default_ranks) + 1)
    backends = [(n, "nccl" if n <= len(machine.gpus) else "gloo") for n in counts]
    return [link for n, backend in backends if (link := remembered_link(machine, n, backend))]


def _line(kind: str, measured: list[dict[str, Any]]) -> CollectiveTime:
    rows = [row for row in measured if row["kind"] == kind]
    largest = rows[-1]
    return CollectiveTime(*fit([(row["bytes"], row["seconds"]) for row in rows]), cpu=largest["cpu"] / largest["bytes"])
