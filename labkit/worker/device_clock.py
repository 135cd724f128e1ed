"""How long the phases of one step took on a CUDA device, where the host's clock only tells when they were queued."""

from __future__ import annotations

from typing import Any

__all__ = ["DeviceClock"]


class DeviceClock:
    """Pairs of events round the phases of a step. Nothing waits for the device before `seconds()`."""

    def __init__(self, torch: Any):
        self._torch = torch
        self._phases: list[tuple[str, Any, Any]] = []
        self._began = self._now()

    def begin(self) -> None:
        self._began = self._now()

    def end(self, phase: str) -> None:
        """The phase that began last ends here, and the next begins."""
        now = self._now()
        self._phases.append((phase, self._began, now))
        self._began = now

    def seconds(self) -> dict[str, float]:
        """Seconds by phase. Waits for the device if it is not done."""
        total: dict[str, float] = {}
        for phase, began, ended in self._phases:
            ended.synchronize()
            total[phase] = total.get(phase, 0.0) + began.elapsed_time(ended) / 1e3
        return total

    def _now(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event
