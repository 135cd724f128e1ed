"""Turns values that a script logs to the logger "metrics" into the metrics of its run.

    import logging

    metrics = logging.getLogger("metrics")
    metrics.info("step %(step)d f1 %(f1).3f", {"step": step, "f1": f1})
    metrics.info({"step": step, "f1": f1})              # without a message

The script does not need labkit for it: anywhere else the standard library prints, filters or ignores such a record as
the script has configured it. In a rank that labkit launched, each record of level INFO or above whose only argument, or
whose message, is a mapping is also written to the rank's `metrics.jsonl`. This does not depend on the script's
handlers, levels, filters and `logging.config`, and does not change them.

    {"k": "report", "t": …, "step": 40, "f1": 0.73}

- **Values** are scalars: numbers (also infinite ones and NaN), bool, None, text, NumPy scalars and tensors of shape ()
  or (1,) (`.item()` waits for their device). Any other object is written as text, at most 200 characters of it.
  Containers and larger arrays are dropped and counted; the view shows the count. A value named `k` or `t` is written as
  `k_` or `t_`, because the record uses those two names.
- **Names** are free; all values are stored and shown alike. labkit interprets `step` (optimizer steps done), `loss` (of
  this rank: the view shows the mean over ranks), `epoch`, `epoch_seconds`, `training_seconds`, `total_steps`,
  `start_step`, `data_ranks`, `parameters`, `checkpoint` ("step-8", or why it was not saved) and names that
  start with `test_`.
- **Every rank** may log its own values. `run.metrics()` shows the values of a record without a step with the last step
  before it, or with the first step if there was none yet.
- **Any rate** is allowed. The first 200 records are written immediately, after that 10 per second; unused capacity adds
  up, to at most 200. Faster records are merged: the newest value of each name is kept, with its step. They are written
  within a second, at the latest when the script ends, so the last value of each name is never lost, and the file grows
  with time, not with steps. (A rank that is killed loses the records of its last second.)

A record that cannot be written is dropped; the training is not affected. Child processes of a rank are not recorded.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from itertools import islice
from numbers import Integral, Real
from types import FrameType
from typing import Any

from labkit.worker.frames import invisible
from labkit.worker.recorder import Recorder

BURST = 200  # records
RECORDS_A_SECOND = 10.0
MOST_VALUES = 500  # in one record, and in all pending records
LONGEST_TEXT = 200
LARGEST_INTEGER = 2**63  # larger integers are not portable in JSON
SCALAR = ((), (1,))


def listen(logger: logging.Logger, reports: Reports) -> None:
    """Have `reports` take what is logged from now on, once however often this is called.

    It does not use a handler, which a script's `if not metrics.handlers` would see and its `dictConfig` would remove.
    """
    if "_log" in vars(logger):
        return
    is_enabled = logger.isEnabledFor
    log: Callable[..., None] = logger._log

    def is_recorded(level: int) -> bool:
        return is_enabled(level) or (level >= logging.INFO and _is_called_to_log(sys._getframe(1)))

    @invisible  # so that the record names the caller's line
    def record(level: int, msg: object, args: Any, *others: Any, **more: Any) -> None:
        reports.take(msg, args)
        if is_enabled(level):
            log(level, msg, args, *others, **more)

    logger.isEnabledFor, logger._log = is_recorded, record  # type: ignore[method-assign]


def _is_called_to_log(frame: FrameType | None) -> bool:
    """Whether a method of logging asks before it logs, and not the script."""
    while frame and frame.f_code.co_name == "isEnabledFor":  # of a LoggerAdapter
        frame = frame.f_back
    return frame is not None and frame.f_globals is vars(logging)


class Reports:
    """Writes mappings as records of this kind: up to BURST at once, RECORDS_A_SECOND on average."""

    def __init__(self, recorder: Recorder, kind: str = "report"):
        self._recorder, self._kind = recorder, kind
        self._process = os.getpid()
        self._lock = threading.RLock()  # a signal handler may log while its own thread does
        self._room, self._updated = float(BURST), time.monotonic()
        self._step: Any = None  # of the newest record with a step
        self._waiting: dict[Any, dict[str, Any]] = {}  # by step, oldest first; each name except "step" occurs once

    def take(self, message: object, args: Any) -> None:
        """Write the logged values, or keep them until the rate allows it. Never raises."""
        try:
            values = args[0] if args and len(args) == 1 else None if args else message
            if not isinstance(values, Mapping) or os.getpid() != self._process:
                return
            self.keep(self._scalars(values), time.monotonic())
        except Exception as error:  # a mapping that cannot be read
            self._recorder.drop(error)

    def keep(self, scalars: dict[str, Any], t: float) -> None:
        """Write these scalars of the time `t`, or keep them until the rate allows it."""
        with self._lock:
            if scalars:
                self._merge(scalars, t)
            self._write()

    def flush(self, *, everything: bool = False) -> None:
        """Write pending records: as many as the rate allows, or everything."""
        if self._waiting and os.getpid() == self._process:
            with self._lock:
                self._write(everything=everything)

    def _scalars(self, values: Mapping[Any, Any]) -> dict[str, Any]:
        scalars = {}
        for name, value in islice(values.items(), MOST_VALUES):
            try:
                scalars[renamed(name)] = _scalar(value)
            except Exception as error:  # an object may raise anything
                self._recorder.drop(error)
        self._recorder.dropped += max(0, len(values) - MOST_VALUES)
        step = scalars.get("step")
        if isinstance(step, float) and step.is_integer():
            scalars["step"] = int(step)
        return scalars

    def _merge(self, values: dict[str, Any], t: float) -> None:
        self._step = values.get("step", self._step)
        for step, older in [*self._waiting.items()]:
            for name in values.keys() - {"step"}:
                older.pop(name, None)
            if older.keys() <= {"t", "step"}:
                del self._waiting[step]
        self._waiting.setdefault(self._step, {}).update(values, t=t)
        while len(self._waiting) > 1 and sum(map(len, self._waiting.values())) > MOST_VALUES:
            self._recorder.dropped += len(self._waiting.pop(next(iter(self._waiting))))

    def _write(self, *, everything: bool = False) -> None:
        now = time.monotonic()
        self._room, self._updated = min(BURST, self._room + (now - self._updated) * RECORDS_A_SECOND), now
        while self._waiting and (everything or self._room >= 1):
            self._room -= 1
            self._recorder.write({"k": self._kind, **self._waiting.pop(next(iter(self._waiting)))})


def renamed(name: object) -> str:
    """The name in a record, which has two of its own."""
    return f"{name}_" if name in ("k", "t") else str(name)[:LONGEST_TEXT]


def _scalar(value: Any) -> Any:
    """The value as a JSON scalar. Raises TypeError for anything else, and whatever the object itself raises."""
    if getattr(value, "shape", None) in SCALAR:  # NumPy's and torch's
        value = value.item()
    if value is None or type(value) in (bool, float):
        return value
    if isinstance(value, Integral) and abs(whole := int(value)) < LARGEST_INTEGER:
        return whole
    if isinstance(value, Real):
        return float(value)
    if not isinstance(value, str) and hasattr(value, "__len__"):
        raise TypeError(f"{type(value).__name__} is not a scalar")
    return str(value)[:LONGEST_TEXT]
