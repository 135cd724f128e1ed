"""What happened on a CUDA device, learnt without making the host wait for it."""

from __future__ import annotations

from typing import Any

__all__ = ["DeviceClock"]


class DeviceClock:
    """The phases of one step, between events on the device's stream, and the loss, copied beside the training.

    The host's clock only tells when kernels were queued. Nothing here waits: ask `is_done` before reading.
    """

    def __init__(self, torch: Any, device: Any):
        self._torch, self._device = torch, device
        self._phases: list[tuple[str, Any, Any]] = []
        self._loss: Any = None
        self._last = self._began = self._now()

    def begin(self) -> None:
        self._began = self._now()

    def end(self, phase: str) -> None:
        """The phase that began last ends here, and the next begins."""
        now = self._now()
        self._phases.append((phase, self._began, now))
        self._began = now

    def keep(self, loss: Any) -> None:
        """Queue a copy of the loss into pinned host memory."""
        if loss.is_cuda:
            host = loss.new_empty((), device="cpu", pin_memory=True)
            host.copy_(loss.reshape(()), non_blocking=True)
            loss = host
        self._loss = loss
        self._now()

    @property
    def is_done(self) -> bool:
        """Whether the device has passed the last event."""
        return bool(self._last.query())

    def read(self, steps: int) -> dict[str, float]:
        """Seconds by phase, times `steps`, and the loss. Only once `is_done`."""
        found: dict[str, float] = {}
        for phase, began, ended in self._phases:
            found[phase] = found.get(phase, 0.0) + began.elapsed_time(ended) / 1e3 * steps
        return found if self._loss is None else found | {"loss": float(self._loss)}

    def _now(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._torch.cuda.current_stream(self._device))
        self._last = event
        return event
