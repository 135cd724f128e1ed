"""Tries and measures the link between this machine's ranks, with scripts that real ranks run for a few seconds.

Can the ranks reach each other? handshake.py tries sums, messages and a split group, with settings known to help: NCCL
may hang silently between consumer GPUs, in WSL2 and in containers, and nearly always one of the same few variables
helps (see NCCL's list of them). How fast is each kind of collective? collective_times.py measures latency and
bandwidth: a message takes latency + bytes / bandwidth (Hockney 1994; nccl-tests' doc/PERFORMANCE.md uses it for
collectives). On gloo a collective also takes CPU time away from the ranks' computation, which is measured, too.

Answers are stored per machine in the user's cache, under a key that names everything they depend on.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from labkit.errors import LabError, LaunchError
from labkit.files import read_json, write_json
from labkit.hardware import Hardware, check_interface, driver_version, hardware
from labkit.host import host_name
from labkit.launch_options import LaunchOptions
from labkit.launcher import check_environment, check_ranks, prepare_launch, start, stop
from labkit.record import State

HANDSHAKE = Path(__file__).with_name("handshake.py")
RUNG_SECONDS = 45.0  # including the start-up of the ranks
NCCL_LADDER: tuple[dict[str, str], ...] = (
    {},
    {"NCCL_P2P_DISABLE": "1"},
    {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
)
COLLECTIVES = Path(__file__).with_name("collective_times.py")
LIMIT_SECONDS = 60.0
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
POLL_SECONDS = 0.1


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
    store("preflight", machine_key(machine, ranks, backend), asdict(result))
    return result


def remembered_preflight(machine: Hardware, ranks: int, backend: str) -> Preflight | None:
    """The stored result of this machine, if its GPUs and torch are still the same."""
    stored = load("preflight", machine_key(machine, ranks, backend))
    try:
        return Preflight(**stored) if isinstance(stored, dict) else None
    except TypeError:
        return None


def _assignments(env: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in env.items())


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
    env = preflight.env if preflight else None
    answer, problem = short_run(COLLECTIVES, ranks, backend, args=[backend], env=env, seconds=LIMIT_SECONDS)
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
        kinds = {kind: CollectiveTime(**stored["kinds"][kind]) for kind in KINDS}
        return Link(**{**stored, "kinds": kinds, "sharding": (*stored["sharding"],)})
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


def short_run(
    script: Path, ranks: int, backend: str, *, args: Sequence[Any], env: Mapping[str, str] | None = None, seconds: float
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
            folder = start(prepare_launch(script, options, {}), tied=True, shares_gpus=True)
        except LabError as error:
            return None, str(error)
        try:
            while not (state := State.read(folder)).is_final:
                time.sleep(POLL_SECONDS)
        except BaseException:  # even on an interrupt, leave nothing running
            stop(folder, grace=0.0)
            raise
        if state.state != "succeeded":
            return None, state.cause.sentence if state.cause else state.state
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
