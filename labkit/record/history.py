"""One rank's records, summarized in bounded series for figures and totals for tables, and one machine's samples.

The samples of NVML, the CPU and the memory are in `hosts/<host>.jsonl`; null is unknown:

    {"k": "meta", "v": 1, "t": …, "time": …, "host": …, "cores": 2, "usable_cores": 2, "memory_total": bytes,
     "devices": [{"name": …, "uuid": …, "memory_total": bytes}]}
    {"k": "host", "t": …, "cpu": percent, "memory_used": bytes, "busy": cores, "own": cores, "throttled": 0 to 1,
     "on_battery": false, "devices": [{"utilisation": percent, "memory_used": bytes, "power": watts,
     "temperature": Celsius, "throttled": false, "others": processes}]}
     (since the record before, of the usable cores: those that worked, and those that worked for the run; "throttled" is
      by heat, "others" are the processes of others on a GPU that the run uses)
    {"k": "runs", "t": …, "runs": [id, …]} (other runs that are active on the same GPUs, or on the cores alone like it)
    {"k": "loaders", "t": …, "ranks": {"0": {"rank": bytes, "workers": 4, "workers_pss": bytes, "copied": bytes}}}
     (the ranks whose DataLoaders have workers now: PSS, which counts what processes share in parts; "copied": what the
      workers have copied, since they were first seen, of the memory that they shared)
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from labkit.dataclass_json import from_json
from labkit.files import Json, finite, number
from labkit.record.log_numbers import Line, LogNumbers, named_step
from labkit.record.losses import Losses
from labkit.record.pace import Pace
from labkit.record.records import (
    DESCRIBING,
    PHASES,
    End,
    Header,
    Memory,
    Model,
    Peak,
    Record,
    Records,
    Report,
    Scalar,
    Step,
    Untracked,
)
from labkit.series import LARGEST, Series
from labkit.tail import LATEST_SECONDS, Tail

KEPT_REPORTS = 1000
KEPT_NAMES = 1000
KEPT_CHANGES = 100
CHARTED_RANKS, CHARTED = 8, 16  # ranks whose reported scalars are kept as series, and how many of them
END_BYTES = 1 << 14
RECENT_RECORDS = 50
RECENT = ("steps", "seconds", "restarts", *PHASES)
FIRST_STEPS = 2
KEPT_PAIRS, REPEATS = 32, 3  # numbers that are compared with the loss, and how many equal ones make them the loss
SERIES = ("step", "loss", "step_seconds", "own_seconds", "throughput", "memory", "reserved")
OWN = ("input", "forward", "optimizer")
READINGS = ("utilisation", "memory_used", "power", "temperature")
RECENT_SAMPLES = 60  # of a machine
HARDLY_IDLE = 0.9  # of the cores work


class _Points:
    """Collects the points of the records being read, because a series takes many at once in a fifth of the time. It has
    two lists, because the garbage collector follows pairs."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.values: list[float] = []

    def add(self, time: float, value: float) -> None:
        self.times.append(time)
        self.values.append(value)


class RankHistory:
    """What one rank has written so far, summarized in memory that does not grow with the run.

    `series` are over seconds since `origin`, the launch (or the rank's own start when None): `loss`, `step_seconds`,
    `throughput` (samples/s of this rank), `memory` (bytes: what the allocator holds on CUDA, else the resident set),
    `reserved` (bytes that CUDA's allocator took from the device), `own_seconds` (a step's seconds in the phases OWN, in
    which a rank works alone: backward waits for the slowest rank, so whole steps take equally long on all ranks).
    `scalars` are series of what the script reported under other names, on the first ranks; without the loss under
    another name, as trackers are given it.
    `totals` are sums over all steps: `steps`, `samples`, `seconds`, and each phase in seconds. `samples` leaves out the
    steps whose samples are unknown; the others are `counted_steps` and take `counted_seconds`. `restarts` are the
    seconds of `input` in which a DataLoader's workers were started again.
    """

    def __init__(self, rank: int, metrics: Path, origin: float | None = None):
        self.rank = rank
        self.origin = origin
        self._records = Records(metrics)
        self.from_log: Sequence[str] = ()  # the metrics whose values are read from its log
        self._log: dict[str, LogNumbers] = {}
        self.restarts: list[float] = []  # when later attempts of the run started, in the seconds of the series
        self.header: Header | None = None
        self.started: float | None = None  # first, in seconds since the epoch
        self.step = 0
        self.seen = 0.0  # when the newest record was written, in the same seconds
        self._shift: float | None = None  # from the host's monotonic clock to those seconds
        summed = ("steps", "samples", "counted_steps", "counted_seconds", "seconds", "restarts", *PHASES)
        self.totals = dict.fromkeys(summed, 0.0)
        self.latest: dict[str, float] = {}
        self.memory_peak = 0.0
        self.model: Model | None = None
        self.traced: Peak | None = None  # of the step whose allocations were traced
        self.untraced = ""  # why no step was traced
        self.lost_at: int | None = None  # the first step whose recorded loss is not finite
        self.finite_at = 0  # the last one before it whose recorded loss is
        self.losses = Losses()  # of this attempt
        self.pace = Pace()  # of this attempt
        self.voided: float | None = None  # the losses from then on were found not to count, in the same seconds
        self._attempt_at = 0.0  # when the attempt started
        self._steps_before = 0  # steps of the run that this one resumed
        self.reports: deque[dict[str, Scalar]] = deque(maxlen=KEPT_REPORTS)
        self.values: dict[str, Scalar] = {}  # the newest value of every name that the script reported
        self.extremes: dict[str, tuple[float, float]] = {}  # the lowest and highest finite value of each of these names
        self.steps_of_extremes: dict[str, dict[float, int]] = {}  # at which these were first reported, if that is known
        self.end: End | None = None
        self.untracked = ""  # the first name that the script logged to a tracker and that is not recorded
        self.series = {name: Series() for name in SERIES}
        self.scalars: dict[str, Series] = {}
        self.saved: deque[float] = deque(maxlen=KEPT_CHANGES)  # when checkpoints were saved, in the same seconds
        self.allocation_retries = 0.0
        self.communicates = False  # whether the time that it waits for collectives is known
        # The newest losses and tracked numbers with their steps, and of each name the numbers that were the loss.
        self._own_losses: deque[tuple[int, float]] = deque(maxlen=KEPT_PAIRS)
        self._tracked: deque[tuple[int, dict[str, Scalar]]] = deque(maxlen=KEPT_PAIRS)
        self._equal: defaultdict[str, set[float]] = defaultdict(set)
        self._recent: deque[tuple[float, ...]] = deque(maxlen=RECENT_RECORDS)  # what RECENT names
        self._recent_sums: dict[str, float] | None = None  # None when out of date
        self._measured: defaultdict[str, _Points] = defaultdict(_Points)
        self._reported: defaultdict[str, _Points] = defaultdict(_Points)

    def recent_seconds(self, phase: str) -> float:
        """Seconds per step spent in a phase, over the newest records; "seconds" is the whole step."""
        return self._sums[phase] / self._sums["steps"] if self._sums["steps"] else 0.0

    @property
    def recent_steps(self) -> float:
        """How many steps the newest records are about."""
        return self._sums["steps"]

    @property
    def _sums(self) -> dict[str, float]:
        """The sums over the newest records."""
        if self._recent_sums is None:
            sums = [float(sum(column)) for column in zip(*self._recent, strict=True)]
            self._recent_sums = dict.fromkeys(RECENT, 0.0) | dict(zip(RECENT, sums, strict=False))
        return self._recent_sums

    @property
    def own_seconds(self) -> float:
        """Seconds per step that the rank works alone, over the newest records."""
        return sum(self.recent_seconds(phase) for phase in OWN)

    @property
    def node_ranks(self) -> range:
        """The ranks that it stands for."""
        return range(self.rank, self.rank + 1)

    @property
    def host(self) -> str:
        """The machine that the rank is on; empty before its first record."""
        return self.header.host if self.header else ""

    @property
    def recent_step_seconds(self) -> float:
        return self.recent_seconds("seconds")

    @property
    def recent_throughput(self) -> float | None:
        """Samples per second over the steps of the step time; None where no sample was counted."""
        samples, steps = (self.totals[name] for name in ("samples", "counted_steps"))
        if samples and steps and self.recent_step_seconds:
            return samples / steps / self.recent_step_seconds
        return self.latest.get("throughput")

    def recent_share(self, phase: str) -> float:
        """The fraction of the newest steps' time that a phase took, 0 to 1."""
        return self.recent_seconds(phase) / self.recent_step_seconds if self.recent_step_seconds else 0.0

    @property
    def device(self) -> str:
        return (self.model.device if self.model else "") or (self.header.device if self.header else "") or "?"

    @property
    def held(self) -> dict[str, float]:
        """Bytes of parameters, gradients and optimizer state on this rank; empty before its first step."""
        return self.model.held if self.model else {}

    @property
    def held_bytes(self) -> float | None:
        """The sum of `held`; None before the first step."""
        return sum(self.held.values()) if self.held else None

    @property
    def memory_limit(self) -> float | None:
        """Bytes of the device, or of the host for a rank on the CPU."""
        return self.model.limit if self.model else None

    @property
    def uuid(self) -> str:
        """The UUID of its GPU, without NVML's prefix."""
        return self.model.uuid if self.model else ""

    @property
    def loss_of(self) -> str:
        """What the newest loss is, or why there is none; empty if the script reports it."""
        return self.losses.what

    @property
    def has_lost_loss(self) -> bool:
        """Whether its loss became nan or infinite and is that still; a fold leaves such a loss out."""
        return self.lost_at is not None and finite(self.latest.get("loss")) is None

    @property
    def figures(self) -> dict[str, float]:
        """The newest value of each metric that the script reported; not of what describes the run."""
        newest = {name: number(value) for name, value in self.values.items() if name not in DESCRIBING}
        return {name: value for name, value in newest.items() if value is not None}

    @property
    def newest(self) -> dict[str, float]:
        """The newest value of `step`, `loss`, `step_seconds`, `throughput`, `memory` and what the script reported."""
        return {**self.figures, **self.latest, "step": float(self.step)}

    @property
    def undecodable(self) -> int:
        """How many lines were not records."""
        return self._records.undecodable

    @property
    def memory_name(self) -> str:
        """What `memory` measures on this rank: the allocator counts only tensors, the resident set everything."""
        return "allocated" if self.device.startswith("cuda") else "resident set"

    def poll(self) -> bool:
        """Read the new records; returns whether there were any."""
        return self._take_all(self._records.poll()) | self._take_log()

    def read_each(self) -> Iterator[None]:
        """Read the new records one by one."""
        for records in self._records.chunks():
            for record in records:
                self._take_all([record])
                yield

    def read_ends(self) -> None:
        """Read only the first and the last 16 KiB, or all if the last step is not among them: they tell its step
        and how it ended. Sums, series and peaks have gaps."""
        self._take_all(self._records.poll(END_BYTES))
        last = Records(self._records.path)
        last.skip(END_BYTES)
        if any(isinstance(record, Step) for record in last.read_all()):
            self._records.skip(END_BYTES)
        self.read_all()

    def read_all(self) -> None:
        """Read all remaining records."""
        for records in self._records.chunks():
            self._take_all(records)
        self._take_log(everything=True)

    def continue_with(self, metrics: Path) -> None:
        """Read the rest of the rank's records in one attempt, then continue with those of the next."""
        self.read_all()
        undecodable, self._records = self.undecodable, Records(metrics)
        self._records.undecodable = undecodable
        self.header, self.end, self._shift, self._steps_before, self.step = None, None, None, 0, 0
        self.losses, self.pace = Losses(), Pace()
        self._log.clear()

    def _take_log(self, *, everything: bool = False) -> bool:
        """Take the new values of metrics from the log, which come later than records of the same time."""
        before = len(self._reported)
        for name in self.from_log if self._shift is not None else ():
            log = self._log.setdefault(name, LogNumbers(self._records.path.parent, name))
            for t, step, value in sorted(map(self._placed, log.poll(everything=everything)), key=itemgetter(0)):
                self._reported[name].add(t, value)
                self.values[name] = value
                self._keep_step(name, value, step)
        found = len(self._reported) > before
        self._add_reported()
        return found

    def _placed(self, line: Line) -> tuple[float, int | None, float]:
        """The time, the step and the value of a line in the log. If the step that it names was made between the looks
        at the log, the time is that of this step, else that of the look, and the step is unknown."""
        since, t = (max(0.0, time + (self._shift or 0.0)) for time in (line.since, line.t))
        series = self.series["step"]
        steps = [(x, int(last)) for x, _, _, last in series.points()]
        step = named_step(line._replace(since=since - series.width, t=t + series.width), steps)
        if step is None:
            return t, None, line.value
        made = next((x for x, number in steps if x >= since and number >= step), t)
        return min(made, t), step, line.value

    def _take_all(self, records: Sequence[Record]) -> bool:
        for record in records:
            self._take(record)
        self._add_measured()
        self._add_reported()
        return bool(records)

    def _add_measured(self) -> None:
        for name, points in self._measured.items():
            self.series[name].extend(points.times, points.values)
        self._measured.clear()

    def _add_reported(self) -> None:
        for name, points in self._reported.items():
            values = [*filter(math.isfinite, points.values), *self.extremes.get(name, ())]
            if name in self.values and values:
                self.extremes[name] = min(values), max(values)
            if self.rank < CHARTED_RANKS and name not in DESCRIBING:
                if name not in self.scalars and len(self.scalars) < CHARTED:
                    self.scalars[name] = Series()
                if name in self.scalars:
                    self.scalars[name].extend(points.times, points.values)
        for name, equal in self._equal.items():
            if len(equal) >= REPEATS:
                self.scalars.pop(name, None)
        self._reported.clear()

    def _take(self, record: Record) -> None:
        if self._shift is None:  # the header pairs the monotonic clock with the wall clock, which ranks share
            wall = record.time if isinstance(record, Header) else None
            since = max(0.0, wall - self.origin) if wall and self.origin else 0.0
            self._attempt_at = max(self.seen, since)
            self._shift = self._attempt_at - record.t
            if self.seen:
                self.restarts.append(self._attempt_at)
        t = self.seen = max(self.seen, record.t + self._shift)
        if isinstance(record, Step):
            self._take_step(t, record)
        elif isinstance(record, Report):
            self._take_report(t, record)
        elif isinstance(record, Header):
            self.header = record
            self.started = record.time if self.started is None else self.started
        elif isinstance(record, Model):
            self.model = record
        elif isinstance(record, Memory):
            self.traced, self.untraced = record.peak or self.traced, record.why or self.untraced
        elif isinstance(record, Untracked):
            self.untracked = record.name
        elif isinstance(record, End):
            self.end = record

    def _take_step(self, t: float, record: Step) -> None:
        phases = {phase: record.phases.get(phase) or 0.0 for phase in PHASES}
        totals, steps = self.totals, record.steps
        for phase, spent in phases.items():
            totals[phase] += spent
        totals["restarts"] += record.restarts
        if not record.is_rest:
            self.step = self._steps_before + (record.step or 0)
            self._measured["step"].add(t, self.step)
            totals["steps"] += steps
            totals["seconds"] += record.seconds
            self.latest["step_seconds"] = record.seconds / steps
            self._measured["step_seconds"].add(t, record.slowest)
            self._take_samples(t, record)
        if "communication" in record.phases:
            self.communicates = record.phases["communication"] is not None
        if self.step > FIRST_STEPS:  # the first steps compile, allocate and warm caches
            steps_here = 0.0 if record.is_rest else steps
            self._recent.append((steps_here, record.seconds, record.restarts, *phases.values()))
            self._recent_sums = None
            self.pace.take(t, self.step, record)
        self.allocation_retries = max(self.allocation_retries, record.retries or 0.0)
        if own := sum(phases[phase] for phase in OWN):
            self._measured["own_seconds"].add(t, own / steps)
        self._take_loss(t, record)
        if record.reserved is not None:
            self.latest["reserved"] = record.reserved
            self._measured["reserved"].add(t, record.reserved)
        memory = record.rss if record.allocated is None else record.allocated
        if memory is not None:
            self.latest["memory"] = memory
            self._measured["memory"].add(t, memory)
            self.memory_peak = max(self.memory_peak, record.peak or memory)

    def _take_samples(self, t: float, record: Step) -> None:
        self.latest.pop("throughput", None)
        if record.samples and record.seconds:
            self.totals["samples"] += record.samples
            self.totals["counted_steps"] += record.steps
            self.totals["counted_seconds"] += record.seconds
            self.latest["throughput"] = rate = record.samples / record.seconds
            self._measured["throughput"].add(t, rate)

    def _take_report(self, t: float, record: Report) -> None:
        values = record.values
        for name, value in values.items():
            if (scalar := number(value)) is not None:
                self._reported[name].add(t, scalar)
        if record.is_tracked:
            self._tracked.append((record.step or 0, values))
            for own, loss in self._own_losses:
                self._compare(own, loss, *self._tracked[-1])
        self._steps_before = record.start_step or self._steps_before
        if record.step and not (record.is_tracked and self.totals["steps"]):
            self.step = max(self.step, record.step)
            self._measured["step"].add(t, self.step)
        self.reports.append(values)
        has_room = len(self.values) < KEPT_NAMES
        self.values |= values if has_room else {k: v for k, v in values.items() if k in self.values}
        for name in values.keys() & self.values.keys():
            self._keep_step(name, number(values[name]), record.step or self.step)
        if str(values.get("checkpoint", "")).removeprefix("step-").isdecimal():  # "step 8 not saved: …" otherwise
            self.saved.append(t)
        self._take_loss(t, record)

    def _keep_step(self, name: str, value: float | None, step: int | None) -> None:
        if step is not None and value is not None and math.isfinite(value):
            steps = self.steps_of_extremes.setdefault(name, {})
            steps.setdefault(value, step)
            for between in steps.keys() - {min(steps), max(steps)}:
                del steps[between]

    def _compare(self, own: int, loss: float, step: int, tracked: dict[str, Scalar]) -> None:
        """Note which of a step's tracked numbers are exactly the loss of this step or one beside it: loops count from
        0."""
        for name, value in tracked.items() if abs(own - step) <= 1 else ():
            if value == loss and len(self._equal[name]) < REPEATS:
                self._equal[name].add(loss)

    def _take_loss(self, t: float, record: Step | Report) -> None:
        loss, void_after = self.losses.take(record)
        if void_after is not None:
            self._forget_losses(void_after)
        if loss is not None:
            self._own_losses.append((self.step, loss))
            for tracked in self._tracked:
                self._compare(self.step, loss, *tracked)
            self._measured["loss"].add(t, loss)
            if self.lost_at is None:
                if abs(loss) <= LARGEST:
                    self.finite_at = self.step
                else:
                    self.lost_at = self.step
        self.latest.pop("loss", None)
        if self.losses.newest is not None:
            self.latest["loss"] = self.losses.newest

    def _forget_losses(self, after: int) -> None:
        """Forget the losses of this attempt's steps after this one."""
        self._add_measured()
        last = self._steps_before + after
        if after:
            self.voided = self.series["step"].first_above(last, self._attempt_at)
            self.finite_at = min(self.finite_at, last)
        else:
            self.voided, self.finite_at = self._attempt_at, 0
        if self.lost_at is not None and (not after or self.lost_at > last):
            self.lost_at = None
        self.series["loss"].cut(self.voided)


@dataclass
class Device:
    """One GPU with its newest readings, each None if the machine does not report it."""

    name: str = ""
    uuid: str = ""
    memory_total: float | None = None  # bytes
    utilisation: float | None = None  # percent
    memory_used: float | None = None
    power: float | None = None  # watts
    temperature: float | None = None  # Celsius
    samples: float = 0.0
    shared: float = 0.0  # samples with processes of others on it, while the run used it
    throttled: float = 0.0  # samples in which heat slowed it down


@dataclass(frozen=True)
class Conditions:
    """Means over some samples of a machine, each from 0 to 1; what is unknown counts as 0. Of the cores that the run
    may use, `others` is what other programs used, and `crowded` that while hardly a core was idle; `throttled` is the
    share of the time in which heat slowed the processor down, `on_battery` that without mains."""

    others: float = 0.0
    crowded: float = 0.0
    throttled: float = 0.0
    on_battery: float = 0.0


@dataclass(frozen=True)
class LoaderMemory:
    """A rank and the workers of its DataLoaders: bytes of PSS, and bytes that the workers have copied of what they
    shared with the rank."""

    rank: int
    workers: int
    workers_pss: int
    copied: int


class HostHistory:
    """One machine, in memory that does not grow with the run. `loaders` are the ranks whose DataLoaders have workers,
    each when it and they took the most memory; `copied` is the most that all workers had copied at a time."""

    def __init__(self, name: str, path: Path):
        self.name = name
        self._tail = Tail(path, self._take)
        self.memory_total: float | None = None
        self.cores: float | None = None
        self.cpu: float | None = None
        self.memory_used: float | None = None
        self.devices: list[Device] = []
        self.loaders: dict[int, LoaderMemory] = {}
        self.workers_pss: dict[int, Series] = {}  # by rank, over the host's monotonic clock
        self.copied = 0
        self.samples = 0
        self.conditions = Conditions()  # so far
        self.runs: dict[str, tuple[float, float]] = {}  # others beside this one, from when to when, since the epoch
        self._recent: deque[Conditions] = deque(maxlen=RECENT_SAMPLES)
        self._usable: float | None = None
        self._shift = 0.0  # from the host's monotonic clock to seconds since the epoch

    def poll(self) -> bool:
        """Read the new records; returns whether there were any."""
        return bool(self._tail.poll())

    def read_all(self) -> None:
        """Read all remaining records."""
        for _ in self._tail.chunks():
            pass

    @property
    def recent_conditions(self) -> Conditions:
        """Over the last minute."""
        columns = zip(*map(astuple, self._recent), strict=True)
        return Conditions(*(fmean(column) for column in columns)) if self._recent else self.conditions

    def as_dict(self) -> dict[str, Json]:
        readings = {k: getattr(self, k) for k in ("memory_total", "cores", "cpu", "memory_used")}
        conditions = {"conditions": asdict(self.conditions), "recent": asdict(self.recent_conditions)}
        return {**readings, **conditions, "runs": self.runs, "devices": [asdict(device) for device in self.devices]}

    @classmethod
    def of(cls, name: str, values: Mapping[str, Json]) -> HostHistory:
        """A machine from its `as_dict`. Raises TypeError, KeyError or AttributeError for anything else."""
        host = cls(name, Path(name))
        host._take_readings(values, "memory_total", "cores", "cpu", "memory_used")
        host._take_devices(values["devices"])
        host.conditions = from_json(Conditions, values.get("conditions")) or host.conditions
        host._recent.append(from_json(Conditions, values.get("recent")) or host.conditions)
        runs = values.get("runs")
        for run, times in runs.items() if isinstance(runs, Mapping) else ():
            for time in times if isinstance(times, list) else ():
                host._take_runs(float(time), [run])
        return host

    def used_by(self, uuids: Collection[str]) -> list[Device]:
        """The devices with these UUIDs, as torch writes them; all devices if none of them is known."""
        used = [device for device in self.devices if device.uuid.removeprefix("GPU-") in uuids]
        return used or self.devices

    def _take(self, record: dict[str, Any]) -> bool:
        devices = [d for d in record.get("devices") or [] if isinstance(d, dict)]
        if record.get("k") == "meta":
            self._take_readings(record, "memory_total", "cores")
            self._usable = finite(record.get("usable_cores"))
            self._shift = (finite(record.get("time")) or 0.0) - record["t"]
            self._take_devices(devices)
        elif record.get("k") == "host":
            self._take_readings(record, "cpu", "memory_used")
            for device, sample in zip(self.devices, devices, strict=False):
                for reading in READINGS:
                    setattr(device, reading, finite(sample.get(reading)))
                device.samples += 1
                device.shared += bool(sample.get("others"))
                device.throttled += bool(sample.get("throttled"))
            self._take_conditions(record)
        elif record.get("k") == "runs":
            self._take_runs(record["t"] + self._shift, record["runs"])
        elif record.get("k") == "loaders":
            self._take_loaders(float(record["t"]), record["ranks"])
        return True

    def _take_runs(self, now: float, runs: Sequence[str]) -> None:
        for run in map(str, runs) if 0 <= now < LATEST_SECONDS else ():
            if run in self.runs or len(self.runs) < KEPT_CHANGES:
                self.runs[run] = self.runs.get(run, (now, now))[0], now

    def _take_conditions(self, record: Mapping[str, Any]) -> None:
        busy, own, throttled = (finite(record.get(name)) for name in ("busy", "own", "throttled"))
        others = crowded = 0.0
        if self._usable and busy is not None and own is not None:
            others = min(1.0, max(0.0, busy - own) / self._usable)
            crowded = others if busy >= HARDLY_IDLE * self._usable else 0.0
        newest = Conditions(others, crowded, throttled or 0.0, float(record.get("on_battery") is True))
        self.samples += 1
        pairs = zip(astuple(self.conditions), astuple(newest), strict=True)
        self.conditions = Conditions(*(before + (now - before) / self.samples for before, now in pairs))
        self._recent.append(newest)

    def _take_loaders(self, t: float, ranks: Mapping[str, Any]) -> None:
        samples = {int(rank): sample for rank, each in ranks.items() if (sample := from_json(LoaderMemory, each))}
        self.copied = max(self.copied, sum(sample.copied for sample in samples.values()))
        for rank, sample in samples.items():
            most = self.loaders.setdefault(rank, sample)
            if sample.rank + sample.workers_pss > most.rank + most.workers_pss:
                self.loaders[rank] = sample
            self.workers_pss.setdefault(rank, Series()).add(t, sample.workers_pss)

    def _take_readings(self, values: Mapping[str, Any], *names: str) -> None:
        for name in names:
            setattr(self, name, finite(values.get(name)))

    def _take_devices(self, devices: Any) -> None:
        self.devices = [device for each in devices if (device := from_json(Device, each))]
