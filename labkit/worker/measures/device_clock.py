"""Measures times and the loss of a CUDA device without making the host wait for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

UNREAD_RECORDS = 64
# What the host knows of steps that the device may not have finished.
COUNTED = ("n", "seconds", "samples", "uncounted")
ON_HOST = ("k", "t", "step", *COUNTED)


class DeviceClock:
    """The phases of one step, between events on the device's stream, and the loss, copied asynchronously.

    The host's clock only shows when kernels were queued. Nothing here waits: check `is_done` before `read`. While the
    script captures a CUDA graph nothing is measured: an event or a query would invalidate the capture.
    """

    def __init__(self, torch: Any, device: Any):
        self._torch, self._device = torch, device
        self._phases: list[tuple[str, Any, Any]] = []
        self._loss: Any = None
        self._newest: dict[Any, Any] = {}  # the last event of each stream
        self._started = self._now(device)

    def begin(self) -> None:
        self._started = self._now(self._device)

    def end(self, phase: str) -> None:
        """End the current phase and start the next."""
        now = self._now(self._device)
        if self._started and now:
            self._phases.append((phase, self._started, now))
        self._started = now

    def keep(self, loss: Any) -> None:
        """Queue a copy of the loss into pinned host memory. It may be on another GPU than the parameters."""
        if self._captures():
            return
        self._loss = loss
        if loss.is_cuda:
            self._loss = loss.new_empty((), device="cpu", pin_memory=True)
            self._loss.copy_(loss.reshape(()), non_blocking=True)
            self._now(loss.device)

    @property
    def is_done(self) -> bool:
        """Whether all streams have passed their last events."""
        return not self._captures() and all(event.query() for event in self._newest.values())

    def read(self, steps: int) -> dict[str, float]:
        """Seconds by phase, times `steps`, and the loss. Call it only when `is_done`."""
        values: dict[str, float] = {}
        for phase, started, ended in self._phases:
            values[phase] = values.get(phase, 0.0) + started.elapsed_time(ended) / 1e3 * steps
        return values if self._loss is None else values | {"loss": float(self._loss)}

    def _captures(self) -> bool:
        return bool(self._torch.cuda.is_current_stream_capturing())

    def _now(self, device: Any) -> Any:
        """An event on the device's current stream; None during a capture."""
        if self._captures():
            return None
        stream, event = self._torch.cuda.current_stream(device), self._torch.cuda.Event(enable_timing=True)
        event.record(stream)
        self._newest[stream] = event
        return event


class Unfinished:
    """Records of steps that the device has not finished, oldest first.

    `write` is called with a record when the device has finished; with one that must be read earlier it is called twice:
    with what the host knows, and later, for the same step, with what the device has measured."""

    def __init__(self, write: Callable[[dict[str, Any]], None]):
        self._write = write
        self._records: deque[_Unfinished] = deque(maxlen=UNREAD_RECORDS)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: dict[str, Any], timed: DeviceClock, *, is_newest: bool, is_told: bool) -> None:
        """Add a record; `timed` has the loss of the newest step; `is_told`: what the host knows has been written."""
        self._records.append(_Unfinished(record, timed, is_newest, is_told))

    def flush(self) -> int:
        """Write those that the device has finished; a device that hangs keeps them forever. Returns how many remain."""
        while self._records and self._records[0].timed.is_done:
            one = self._records.popleft()
            record = one.record | one.timed.read(steps := one.record["n"])
            if not one.is_newest:
                record.pop("loss", None)
            if one.is_told:  # this is the second part
                record = {"of": steps, **{k: v for k, v in record.items() if k not in COUNTED}}
            self._write(record)
        return len(self._records)

    def tell(self, seconds: float = 0.0) -> None:
        """Write what the host knows of the steps that have waited that long. It makes no call to the device."""
        for one in self._records:
            if not one.is_told and time.monotonic() - one.record["t"] >= seconds:
                self.tell_of(one.record)
                one.is_told = True

    def tell_of(self, record: dict[str, Any]) -> None:
        """Write what the host knows of a step."""
        self._write({name: record[name] for name in ON_HOST})


@dataclass(slots=True)
class _Unfinished:
    record: dict[str, Any]
    timed: DeviceClock
    is_newest: bool
    is_told: bool
