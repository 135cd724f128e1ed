"""The link between this machine's ranks, measured: latency and bandwidth of each kind of collective.

The model of a message is latency + bytes / bandwidth (Hockney 1994; nccl-tests' doc/PERFORMANCE.md says the same of
collectives). On gloo a collective is also work for the cores, which ranks that compute then lack: it is measured too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.errors import LaunchError
from labkit.launcher.checks import check_ranks
from labkit.launcher.hardware import Hardware, hardware
from labkit.launcher.link.preflight import remembered as remembered_preflight
from labkit.launcher.link.short_run import keep, kept, machine_key, short_run

__all__ = ["KINDS", "CollectiveTime", "Link", "fit", "measure_link", "remembered_link", "remembered_links"]

COLLECTIVES = Path(__file__).with_name("collective_times.py")
LIMIT_SECONDS = 60.0
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")


@dataclass(frozen=True)
class CollectiveTime:
    """Seconds of one call on an array of `bytes`: `latency` + `per_byte` x bytes, within a factor 1 +- `residual` (root
    mean square of the relative misses). `cpu`: core-seconds per byte that it takes of each rank's cores."""

    latency: float
    per_byte: float
    residual: float
    cpu: float = 0.0

    def seconds(self, bytes: float, calls: int = 1) -> float:
        """Of so many calls on so many bytes in all."""
        return self.latency * calls + self.per_byte * bytes

    def __str__(self) -> str:
        return f"{self.latency * 1e6:,.0f} us + {1e-9 / self.per_byte:.3g} GB/s" if self.per_byte else "latency only"


@dataclass(frozen=True)
class Link:
    """Of `ranks` ranks of one machine. `kinds` has a CollectiveTime for each of KINDS; `when` in seconds since the
    epoch. `sharding` is what FSDP costs a rank besides waiting, in seconds: (per unit and step, per byte gathered or
    scattered).
    """

    backend: str
    ranks: int
    kinds: Mapping[str, CollectiveTime]
    when: float = 0.0
    sharding: tuple[float, float] = (0.0, 0.0)


def fit(measured: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """(latency, seconds per byte, residual) of `(bytes, seconds)`: least squares of the relative misses, so that 4 KiB
    count as much as 64 MiB. Neither of the two is below 0."""
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
    misses = [(latency * r[0] + per_byte * r[1] - 1) ** 2 for r in rows]
    return latency, per_byte, (sum(misses) / len(misses)) ** 0.5


def measure_link(ranks: int | None = None, *, machine: Hardware | None = None) -> Link:
    """Let so many ranks (by default one per GPU, or two) do each kind of collective; takes some ten seconds, keeps the
    result. Raises LaunchError when they cannot."""
    machine = machine or hardware()
    ranks = check_ranks(machine.default_ranks if ranks is None else ranks, None, machine)
    if ranks < 2:
        raise LaunchError("a link is between ranks: bandwidth is measured with 2 or more")
    backend = machine.backend
    known = remembered_preflight(machine, ranks, backend)
    said, problem = short_run(
        COLLECTIVES, ranks, backend, args=[backend], env=known.env if known else None, seconds=LIMIT_SECONDS
    )
    if problem:
        raise LaunchError(f"the bandwidth between {ranks} ranks could not be measured: {problem}")
    link = Link(backend, ranks, {kind: _line(kind, said["kinds"]) for kind in KINDS}, time.time(), (*said["sharding"],))
    keep("bandwidth", machine_key(machine, ranks, backend), asdict(link))
    return link


def remembered_link(machine: Hardware, ranks: int, backend: str) -> Link | None:
    """What was measured before between so many ranks, as long as the GPUs and torch are the same."""
    known = kept("bandwidth", machine_key(machine, ranks, backend))
    try:
        return (
            Link(
                **{
                    **known,
                    "kinds": {k: CollectiveTime(**v) for k, v in known["kinds"].items()},
                    "sharding": (*known["sharding"],),
                }
            )
            if known
            else None
        )
    except (TypeError, KeyError, AttributeError):
        return None


def remembered_links(machine: Hardware) -> list[Link]:
    """Of all numbers of ranks that this machine was asked about, fewest first."""
    counts = range(2, max(2 * machine.cores, len(machine.gpus), machine.default_ranks) + 1)
    backends = [(n, "nccl" if n <= len(machine.gpus) else "gloo") for n in counts]
    return [link for n, backend in backends if (link := remembered_link(machine, n, backend))]


def _line(kind: str, measured: list[dict[str, Any]]) -> CollectiveTime:
    rows = [row for row in measured if row["kind"] == kind]
    largest = rows[-1]
    return CollectiveTime(*fit([(row["bytes"], row["seconds"]) for row in rows]), cpu=largest["cpu"] / largest["bytes"])
