"""Reads values that a device computes when it has computed them, without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

UNREAD = 64


class Later:
    """Values of CPU tensors are read at once, those on CUDA are copied to pinned memory and read by a later `poll`."""

    def __init__(self, torch: Any, drop: Callable[[BaseException], None]):
        self._torch, self._drop = torch, drop
        self.waiting: deque[tuple[Any, Any, Callable[[list[Any]], None]]] = deque(maxlen=UNREAD)

    def read(self, values: Any, then: Callable[[list[Any]], None]) -> None:
        """Call `then` with the values of this tensor. Nothing is read while the script captures a CUDA graph."""
        if not values.is_cuda:
            then(values.tolist())
        elif not self.captures():
            copy = values.new_empty(values.shape, device="cpu", pin_memory=True)
            copy.copy_(values, non_blocking=True)
            done = self._torch.cuda.Event()
            done.record(self._torch.cuda.current_stream(values.device))
            self.waiting.append((done, copy, then))

    def poll(self) -> None:
        """Call those whose values are there. Never raises."""
        while self.waiting and not self.captures() and self.waiting[0][0].query():
            _, copy, then = self.waiting.popleft()
            try:
                then(copy.tolist())
            except Exception as error:
                self._drop(error)

    def captures(self) -> bool:
        """Whether the script captures a CUDA graph, in which nothing may be computed or queried."""
        return bool(self._torch.cuda.is_initialized() and self._torch.cuda.is_current_stream_capturing())
