"""Times and the loss of a CUDA device, measured without making the host wait for it."""

from __future__ import annotations

from typing import Any

__all__ = ["DeviceClock"]


class DeviceClock:
    """The phases of one step, between events on the device's stream, and the loss, copied asynchronously.

    The host's clock only shows when kernels were queued. Nothing here waits: check `is_done` before `read`. While the
    script captures a CUDA graph nothing is measured: an event or a query would invalidate the capture.
    """

    def __init__(self, torch: Any, device: Any):
        self._torch, self._device = torch, device
        self._phases: list[tuple[str, Any, Any]] = []
        self._loss: Any = None
        self._last = self._started = self._now()

    def begin(self) -> None:
        self._started = self._now()

    def end(self, phase: str) -> None:
        """End the current phase and start the next."""
        now = self._now()
        if self._started and now:
            self._phases.append((phase, self._started, now))
        self._started = now

    def keep(self, loss: Any) -> None:
        """Queue a copy of the loss into pinned host memory."""
        if self._captures():
            return
        if loss.is_cuda:
            host = loss.new_empty((), device="cpu", pin_memory=True)
            host.copy_(loss.reshape(()), non_blocking=True)
            loss = host
        self._loss = loss
        self._now()

    @property
    def is_done(self) -> bool:
        """Whether the device has passed the last event."""
        return not self._captures() and (self._last is None or bool(self._last.query()))

    def read(self, steps: int) -> dict[str, float]:
        """Seconds by phase, times `steps`, and the loss. Call it only when `is_done`."""
        values: dict[str, float] = {}
        for phase, started, ended in self._phases:
            values[phase] = values.get(phase, 0.0) + started.elapsed_time(ended) / 1e3 * steps
        return values if self._loss is None else values | {"loss": float(self._loss)}

    def _captures(self) -> bool:
        return bool(self._torch.cuda.is_current_stream_capturing())

    def _now(self) -> Any:
        """An event on the stream; None during a capture."""
        if self._captures():
            return None
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._torch.cuda.current_stream(self._device))
        self._last = event
        return event
