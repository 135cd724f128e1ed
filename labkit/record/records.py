"""The records of a rank's `metrics.jsonl`.

One JSON object per line. Times `t` are `time.monotonic()` seconds on the rank's host; the header pairs one of them with
the wall clock. Readers ignore what they do not know.

    {"k": "meta", "v": 1, "t": …, "time": …, "rank": 0, "local_rank": 0, "world_size": 2, "host": …,
     "pid": …, "forked": true, "torch": "2.13.0", "resident": bytes}
     (forked: of a process that had imported torch; resident: Python and torch, before there is a model)
    {"k": "step", "t": …, "step": 40, "n": 4, "seconds": [sum, min, max], "samples": 512, "input": s,
     "forward": s, "backward": s, "optimizer": s, "communication": s, "loss": 0.31, "rss": bytes}
     (n is how many steps the line sums up; "samples" is null if they are unknown; on CUDA "allocated", "reserved",
      "peak" in bytes and "retries" instead of "rss", and the phases are those of one step, timed by events, times n.
      The phases exclude each other: "communication" is the wait for collectives that no computation hides, null if it
      is unknown. "restarts", if present: the seconds of "input", at least, in which a DataLoader started its workers
      again for another epoch.
      Most lines have "loss", null if there is known to be none. "loss_of" says what the loss is, unless it is what
      backward() was called on, or why it is null; "void_after": 2 means that the losses of the steps after step 2
      do not belong to the training. "training": 2 is present from a script's second training on.
      A line with "of" instead of "n" is the second part of an earlier one for the same step, which was written before
      the device had finished its "of" steps and so lacks their phases, memory and loss)
    {"k": "model", "t": …, "device": "cpu", "limit": bytes, "parameters": bytes, "gradients": bytes, "optimizer": bytes}
     (the bytes that this rank holds after its first step, and the memory of its device, or of the host; on CUDA also
      the GPU's "uuid")
    {"k": "memory", "t": …, "step": 3, "bytes": …, "phase": "backward", "operation": "aten.mm.default",
     "categories": {"parameters": bytes, …}}
     (the peak of the step that `trace_memory` traced; "missed": tensors that it could not trace)
    {"k": "untraced", "t": …, "why": …}                                                or why there is none
    {"k": "report", "t": …, "step": 40, "f1": 0.7}
     (what the script logged to the logger "metrics", see worker/metrics_logger.py; names and values are the script's
      own, and "step" may be missing)
    {"k": "tracked", "t": …, "step": 40, "val/accuracy": 0.73}
     (what the script logged to a tracker, see worker/trackers.py)
    {"k": "untracked", "t": …, "name": "grad/layer9"}
     (the first name that came after the last one that is taken)
    {"k": "end", "t": …, "step": 200, "outcome": "finished" | "raised" | "exited", "dropped": 0}
     ("line": the script's in which it raised or exited; "passes": backward passes, if there was no step;
      "problem": the first of what was dropped)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from labkit.dataclass_json import from_json
from labkit.files import finite, number
from labkit.tail import Tail, last_records

PHASES = ("input", "forward", "backward", "optimizer", "communication")
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
TRACKED = {"step", "epoch", "loss"}  # of these, what a tracker's number may be called
LONGEST_TEXT = 1000  # of a reported value
PASSED = "as passed to backward()"

Scalar = float | int | str | bool | None


class _Peak(NamedTuple):
    bytes: int
    phase: str
    operation: str
    categories: dict[str, int]


class Peak(_Peak):
    """Bytes held at the peak, in total and by category; the phase of the step and the last operation that allocated."""

    __slots__ = ()
    # A storage that fits several categories counts as the first: a gathered parameter is also saved for backward.
    CATEGORIES: ClassVar = ("parameters", "gradients", "optimizer", "communication", "activations", "temporary")


@dataclass(frozen=True, slots=True)
class Header:
    """The start of a rank; `time` is `t` by the wall clock, `resident` the bytes of Python and torch."""

    t: float
    time: float | None = None
    host: str = ""
    world_size: int | None = None
    device: str = ""
    resident: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The sums over `steps` steps, of which `step` is the last. `is_rest`: the second part of an earlier record.

    `phases` are the seconds of those that the record has, None if unknown. `has_loss`: the record says what the loss
    is, or that there is none, of which `loss_of` is the reason.
    """

    t: float
    step: int | None
    steps: float
    is_rest: bool
    seconds: float
    fastest: float
    slowest: float
    samples: float | None
    phases: dict[str, float | None]
    has_loss: bool
    loss: float | None
    loss_of: str
    void_after: int | None
    training: int
    rss: float | None
    allocated: float | None
    reserved: float | None
    peak: float | None
    retries: float | None
    restarts: float
    PHASES: ClassVar = PHASES
    # The columns of every row of `rows`, even if nothing was recorded in them.
    COLUMNS: ClassVar = (
        "rank",
        "attempt",
        "step",
        "time",
        "samples",
        *PHASES,
        "loss",
        "steps",
        "step_seconds",
        "step_seconds_min",
        "step_seconds_max",
        "throughput",
    )

    @staticmethod
    def last(metrics: Path) -> int:
        """The step in the last complete record, even a report, of a rank's file that has one; else 0."""
        ends = last_records(metrics, decode)
        return next((each.step for each in ends if isinstance(each, Step | Report) and each.step is not None), 0)


@dataclass(frozen=True, slots=True)
class Model:
    """What a rank holds after its first step: bytes of its `parameters`, `gradients` and `optimizer` state."""

    t: float
    device: str = ""
    uuid: str = ""
    limit: float | None = None
    held: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Memory:
    """The peak of the traced step, or why no step was traced."""

    t: float
    peak: Peak | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What the script reported: all of `values`, with the step that it named, if any. `is_tracked`: to a tracker, whose
    names say nothing of the run."""

    t: float
    step: int | None
    values: dict[str, Scalar]
    is_tracked: bool = False

    @property
    def loss(self) -> float | None:
        return number(self.values.get("loss"))

    @property
    def start_step(self) -> int:
        """The steps of the run that this one resumed; 0 if the script does not say."""
        return _count(self.values.get("start_step")) or 0


@dataclass(frozen=True, slots=True)
class Untracked:
    """From the number of this name on, those of new names that the script logs to trackers are not recorded."""

    t: float
    name: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """How a rank's script ended, at `line` if it raised or exited; `passes` are its backward passes if there was no
    step."""

    t: float
    outcome: str = ""
    dropped: int = 0
    passes: float | None = None
    line: int | None = None

    @classmethod
    def read(cls, metrics: Path) -> End | None:
        """The record at the end of a rank's file; None while it runs."""
        return next((each for each in last_records(metrics, decode) if isinstance(each, cls)), None)


@dataclass(frozen=True, slots=True)
class Event:
    """What the run's owner asked of the ranks, at `time` in seconds since the epoch."""

    t: float
    kind: str
    time: float | None
    step: int | None
    condition: str | None
    values: dict[str, Scalar]  # what was set
    has_errors: bool


Record = Header | Step | Model | Memory | Report | Untracked | End | Event


def decode(record: Mapping[str, Any]) -> Record | None:
    """What a line of a rank's file says; None if its kind is not known. Raises one of UNSOUND if fields do not match
    the kind."""
    t, kind = float(record["t"]), record.get("k")
    if kind == "step":
        return _step(t, record)
    if kind in ("report", "tracked"):
        hidden = ("k", "t") if kind == "report" else ("k", "t", *(DESCRIBING - TRACKED))
        values = {k: v for k, v in record.items() if k not in hidden and len(k) < LONGEST_TEXT and _is_scalar(v)}
        return Report(t, _count(values.get("step")), values, is_tracked=kind == "tracked")
    if kind == "untracked":
        return from_json(Untracked, record)
    if kind == "meta":
        return from_json(Header, record)
    if kind == "model":
        held = {name: record.get(name) for name in ("parameters", "gradients", "optimizer")}
        return from_json(Model, {**record, "held": held})
    if kind == "memory":
        categories = {str(name): int(size) for name, size in record["categories"].items()}
        return Memory(t, Peak(int(record["bytes"]), str(record["phase"]), str(record["operation"]), categories))
    if kind == "untraced":
        return Memory(t, why=str(record["why"])[:LONGEST_TEXT])
    if kind == "end":
        return from_json(End, record)
    return _event(t, record) if kind is None and "kind" in record else None


def _event(t: float, record: Mapping[str, Any]) -> Event:
    values, condition = record.get("values"), record.get("condition")
    return Event(
        t,
        str(record["kind"]),
        finite(record.get("time")),
        _count(record.get("step")),
        condition if isinstance(condition, str) else None,
        {name: v for name, v in values.items() if _is_scalar(v)} if isinstance(values, dict) else {},
        "errors" in record,
    )


def _step(t: float, record: Mapping[str, Any]) -> Step:
    get = record.get
    is_rest = "of" in record
    seconds, fastest, slowest = get("seconds", (0.0, 0.0, 0.0))
    return Step(
        t,
        _count(get("step")),
        finite(get("of" if is_rest else "n")) or 1.0,
        is_rest,
        finite(seconds) or 0.0,
        finite(fastest) or 0.0,
        finite(slowest) or 0.0,
        finite(get("samples")),
        {phase: finite(record[phase]) for phase in PHASES if phase in record},
        "loss" in record,
        number(get("loss")),
        str(get("loss_of") or PASSED)[:LONGEST_TEXT] if "loss" in record else "",
        _count(get("void_after")),
        _count(get("training")) or 1,
        finite(get("rss")),
        finite(get("allocated")),
        finite(get("reserved")),
        finite(get("peak")),
        finite(get("retries")),
        finite(get("restarts")) or 0.0,
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < 1 << 53 else None if (n := finite(value)) is None else int(n)


def _is_scalar(value: Any) -> bool:
    """Whether a value is small enough to keep in memory: a script may report anything."""
    return (
        value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) < LONGEST_TEXT)
    )


class Records(Tail[Record]):
    """The records of one rank's file, or of the events of an attempt, as they are written."""

    def __init__(self, path: Path):
        super().__init__(path, decode)
