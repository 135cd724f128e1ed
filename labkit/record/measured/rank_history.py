"""One rank's records, summarized: bounded series for figures, totals for tables."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Any

from labkit.record.measured.metrics_file import Tail, finite, number
from labkit.record.measured.peak import Peak
from labkit.record.measured.series import LARGEST, Series

__all__ = ["DESCRIBING", "KEPT_CHANGES", "OWN", "PHASES", "SERIES", "RankHistory"]

PHASES = ("input", "forward", "backward", "optimizer", "communication")
KEPT_REPORTS = 1000
KEPT_NAMES = 1000
KEPT_CHANGES = 100
CHARTED_RANKS, CHARTED = 8, 16  # ranks whose reported scalars are kept as series, and how many of them
# Reported values that describe the run, or are recorded otherwise.
DESCRIBING = {
    "step",
    "epoch",
    "loss",
    "total_steps",
    "start_step",
    "steps_per_epoch",
    "parameters",
    "data_ranks",
    "train_samples",
    "test_samples",
    "epoch_seconds",
    "training_seconds",
}
LONGEST_TEXT = 1000  # of a reported value
END_BYTES = 1 << 14
RECENT_RECORDS = 50
RECENT = ("steps", "seconds", *PHASES)
FIRST_STEPS = 2
SERIES = ("step", "loss", "step_seconds", "own_seconds", "throughput", "memory", "reserved")
OWN = ("input", "forward", "optimizer")
PASSED = "as passed to backward()"


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
    `scalars` are series of what the script reported under other names, on the first ranks.
    `totals` are sums over all steps: `steps`, `samples`, `seconds`, and each phase in seconds. `samples` leaves out the
    steps whose samples are unknown; the others are `counted_steps` and take `counted_seconds`.
    """

    def __init__(self, rank: int, tail: Tail, origin: float | None = None):
        self.rank = rank
        self.origin = origin
        self.tail = tail
        self.restarts: list[float] = []  # when later attempts of the run started, in the seconds of the series
        self.meta: dict[str, Any] = {}
        self.step = 0
        self.seen = 0.0  # when the newest record was written, in the same seconds
        self._shift: float | None = None  # from the host's monotonic clock to those seconds
        self.totals = dict.fromkeys(("steps", "samples", "counted_steps", "counted_seconds", "seconds", *PHASES), 0.0)
        self.latest: dict[str, float] = {}
        self.memory_peak = 0.0
        self.held: dict[str, Any] = {}  # device; bytes of parameters, gradients and optimizer state on this rank
        self.uuid = ""  # of its GPU, without NVML's prefix
        self.traced: Peak | None = None  # of the step whose allocations were traced
        self.untraced = ""  # why no step was traced
        self.lost_at: int | None = None  # the first step whose recorded loss is not finite
        self.finite_at = 0  # the last one before it whose recorded loss is
        self.loss_of = ""  # what the newest loss is, or why there is none; empty if the script reports it
        self._training = 1  # the number of the current training in this script
        self._steps_before = 0  # steps of the run that this one resumed
        self.reports: deque[dict[str, Any]] = deque(maxlen=KEPT_REPORTS)
        self.values: dict[str, Any] = {}  # the newest value of every name that the script reported
        self.extremes: dict[str, tuple[float, float]] = {}  # the lowest and highest finite value of each of these names
        self.end: dict[str, Any] = {}
        self.series = {name: Series() for name in SERIES}
        self.scalars: dict[str, Series] = {}
        self.saved: deque[float] = deque(maxlen=KEPT_CHANGES)  # when checkpoints were saved, in the same seconds
        self.allocation_retries = 0.0
        self.communicates = False  # whether the time that it waits for collectives is known
        self.memory_limit: float | None = None  # bytes of the device, or of the host for ranks on the CPU
        self._recent: deque[tuple[float, ...]] = deque(maxlen=RECENT_RECORDS)  # what RECENT names
        self._recent_sums: dict[str, float] | None = None  # None when out of date
        self._script_reports_loss = False
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
        """Over the newest records."""
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
        return str(self.meta.get("host") or "")

    @property
    def recent_step_seconds(self) -> float:
        return self.recent_seconds("seconds")

    def recent_share(self, phase: str) -> float:
        """The fraction of the newest steps' time that a phase took, 0 to 1."""
        return self.recent_seconds(phase) / self.recent_step_seconds if self.recent_step_seconds else 0.0

    @property
    def device(self) -> str:
        return str(self.held.get("device") or self.meta.get("device", "?"))

    @property
    def held_bytes(self) -> float | None:
        """Bytes of parameters, gradients and optimizer state on this rank; None before its first step."""
        sizes = [v for k in ("parameters", "gradients", "optimizer") if (v := number(self.held.get(k))) is not None]
        return sum(sizes) if sizes else None

    @property
    def memory_name(self) -> str:
        """What `memory` measures on this rank: the allocator counts only tensors, the resident set everything."""
        return "allocated" if self.device.startswith("cuda") else "resident set"

    def poll(self) -> bool:
        """Read the new records; returns whether there were any."""
        return self._take_all(self.tail.poll())

    def read_ends(self) -> None:
        """Read only the first and the last 16 KiB, or all if the last step is not among them: they tell its step
        and how it ended. Sums, series and peaks have gaps."""
        self._take_all(self.tail.poll(END_BYTES))
        last = Tail(self.tail.path)
        last.skip(END_BYTES)
        if any(record.get("k") == "step" for record in last.read_all()):
            self.tail.skip(END_BYTES)
        self.read_all()

    def read_all(self) -> None:
        """Read all remaining records."""
        for records in self.tail.chunks():
            self._take_all(records)

    def continue_with(self, tail: Tail) -> None:
        """Read the rest of the rank's records in one attempt, then continue with those of the next."""
        self.read_all()
        tail.undecodable += self.tail.undecodable
        self.tail = tail
        self.meta, self.end, self._shift, self._steps_before, self.step = {}, {}, None, 0, 0

    def _take_all(self, records: list[dict[str, Any]]) -> bool:
        for record in records:
            try:
                self._take(record)
            except (TypeError, ValueError, OverflowError, KeyError):  # fields that do not match metrics_file.py
                self.tail.undecodable += 1
        self._add_reported()
        for name, points in self._measured.items():
            self.series[name].extend(points.times, points.values)
        self._measured.clear()
        return bool(records)

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
        self._reported.clear()

    def _take(self, record: dict[str, Any]) -> None:
        kind = record.get("k")
        if kind == "meta":
            self.meta = record
        if self._shift is None:  # the header pairs the monotonic clock with the wall clock, which ranks share
            wall = number(record.get("time"))
            since = max(0.0, wall - self.origin) if wall and self.origin else 0.0
            self._shift = max(self.seen, since) - record["t"]
            if self.seen:
                self.restarts.append(record["t"] + self._shift)
        t = self.seen = max(self.seen, record["t"] + self._shift)
        if kind == "step":
            self._take_step(t, record)
        elif kind == "report":
            self._take_report(t, record)
        elif kind == "model":
            self.held = {k: v for k, v in record.items() if k not in ("k", "t", "limit", "uuid")}
            self.uuid = str(record.get("uuid") or "")
            self.memory_limit = finite(record.get("limit"))
        elif kind == "memory":
            self.traced = Peak(*(record[field] for field in Peak._fields))
        elif kind == "untraced":
            self.untraced = str(record["why"])[:LONGEST_TEXT]
        elif kind == "end":
            self.end = record

    def _take_step(self, t: float, record: dict[str, Any]) -> None:
        is_second_part = "of" in record  # of a line with the same step
        steps = number(record.get("of" if is_second_part else "n")) or 1.0
        seconds, _fastest, slowest = record.get("seconds", (0, 0, 0))
        seconds, slowest = finite(seconds) or 0.0, finite(slowest) or 0.0
        phases = {phase: finite(record.get(phase)) or 0.0 for phase in PHASES}
        totals = self.totals
        for phase, spent in phases.items():
            totals[phase] += spent
        if not is_second_part:
            self.step = self._steps_before + int(number(record.get("step")) or 0)
            self._measured["step"].add(t, self.step)
            totals["steps"] += steps
            totals["seconds"] += seconds
            self.latest["step_seconds"] = seconds / steps
            self._measured["step_seconds"].add(t, slowest)
            self._take_samples(t, finite(record.get("samples")) or 0.0, steps, seconds)
        if "communication" in record:
            self.communicates = finite(record["communication"]) is not None
        if self.step > FIRST_STEPS:  # the first steps compile, allocate and warm caches
            self._recent.append((0.0 if is_second_part else steps, seconds, *phases.values()))
            self._recent_sums = None
        self.allocation_retries = max(self.allocation_retries, number(record.get("retries")) or 0.0)
        if own := sum(phases[phase] for phase in OWN):
            self._measured["own_seconds"].add(t, own / steps)
        if not self._script_reports_loss:
            self._take_probed_loss(t, record)
        if (reserved := number(record.get("reserved"))) is not None:
            self.latest["reserved"] = reserved
            self._measured["reserved"].add(t, reserved)
        memory = number(record.get("allocated", record.get("rss")))
        if memory is not None:
            self.latest["memory"] = memory
            self._measured["memory"].add(t, memory)
            self.memory_peak = max(self.memory_peak, number(record.get("peak")) or memory)

    def _take_samples(self, t: float, samples: float, steps: float, seconds: float) -> None:
        """Samples are 0 if they are unknown."""
        self.latest.pop("throughput", None)
        if samples and seconds:
            self.totals["samples"] += samples
            self.totals["counted_steps"] += steps
            self.totals["counted_seconds"] += seconds
            self.latest["throughput"] = samples / seconds
            self._measured["throughput"].add(t, samples / seconds)

    def _take_report(self, t: float, record: dict[str, Any]) -> None:
        values = {}
        for name, value in record.items():
            if name in ("k", "t") or len(name) >= LONGEST_TEXT:
                continue
            if (scalar := number(value)) is not None:
                self._reported[name].add(t, scalar)
            elif not _is_short(value):
                continue
            values[name] = value
        self._steps_before = int(finite(values.get("start_step")) or self._steps_before)
        if step := int(finite(values.get("step")) or 0):
            self.step = max(self.step, step)
            self._measured["step"].add(t, self.step)
        self.reports.append(values)
        has_room = len(self.values) < KEPT_NAMES
        self.values |= values if has_room else {k: v for k, v in values.items() if k in self.values}
        if str(values.get("checkpoint", "")).removeprefix("step-").isdecimal():  # "step 8 not saved: …" otherwise
            self.saved.append(t)
        loss = number(values.get("loss"))
        if loss is not None:
            if not self._script_reports_loss:  # the script's own value takes precedence over the probe's
                self._script_reports_loss, self.loss_of = True, ""
                self._forget_losses()
            self._take_loss(t, loss)

    def _take_probed_loss(self, t: float, record: dict[str, Any]) -> None:
        """The loss that the probe derived from what backward() was called on."""
        if (training := record.get("training", 1)) != self._training:
            self._training, self.loss_of = training, ""
            self.latest.pop("loss", None)
        if record.get("void_after") == 0:
            self._forget_losses()
        if "loss" in record:
            self.loss_of = str(record.get("loss_of", PASSED))[:LONGEST_TEXT]
            self.latest.pop("loss", None)
        loss = number(record.get("loss"))
        if loss is not None:
            self._take_loss(t, loss)

    def _forget_losses(self) -> None:
        self.series["loss"], self.lost_at, self.finite_at = Series(), None, 0
        self._measured.pop("loss", None)

    def _take_loss(self, t: float, loss: float) -> None:
        self.latest["loss"] = loss
        self._measured["loss"].add(t, loss)
        if self.lost_at is None:
            if abs(loss) <= LARGEST:
                self.finite_at = self.step
            else:
                self.lost_at = self.step


def _is_short(value: Any) -> bool:
    """Whether a value is small enough to keep in memory: a script may report anything."""
    return value is None or isinstance(value, bool) or (isinstance(value, str) and len(value) < LONGEST_TEXT)
