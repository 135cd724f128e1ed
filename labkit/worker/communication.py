"""How long this rank waits for collectives: the part of communication that its computing does not hide.

Three places tell, whatever the strategy: `Work.wait`, where FSDP, ZeRO, pipelines and a script's own collectives
wait; `wait_tensor`, where DTensor's do (tensor parallel); and DDP's own log, because its reducer waits in C++.

On CUDA a wait is put into the stream and the host goes on: there only DDP's log, timed by events, is known.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["Communication"]

clock = time.perf_counter


class Communication:
    """`waited` is how many seconds the script's main thread has waited so far."""

    def __init__(self) -> None:
        self.waited = 0.0
        self._thread = threading.get_ident()  # an asynchronous checkpoint waits beside the training, not in it
        self._replicated: Callable[[], Any] = lambda: None  # weak reference to the newest DDP model

    def hook(self, torch: Any) -> None:
        """Before the script runs; its process group may come later, or never."""
        if not torch.distributed.is_available():
            return
        torch.distributed.Work.wait = self._timed(torch.distributed.Work.wait)
        init = torch.nn.parallel.DistributedDataParallel.__init__

        @functools.wraps(init)
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
            init(model, *args, **kwargs)
            self._replicated = weakref.ref(model)

        torch.nn.parallel.DistributedDataParallel.__init__ = __init__

    def hook_functional(self) -> None:
        """Once the script has loaded DTensor, if it does: its module costs a second to import."""
        functional: Any = sys.modules.get("torch.distributed._functional_collectives")
        if functional is not None:
            functional.wait_tensor = self._timed(functional.wait_tensor)

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = clock()
            try:
                return wait(*args, **kwargs)
            finally:
                if threading.get_ident() == self._thread:
                    self.waited += clock() - started

        return timed

    def in_backward(self) -> float | None:
        """Seconds that DDP's newest sampled backward went on after its computing was done; None without DDP.

        torch samples the first ten backwards and every hundredth after them.
        """
        model = self._replicated()
        if model is None:
            return None
        seen = model._get_ddp_logging_data()  # nanoseconds
        if "backward_comm_time" not in seen:  # before the second forward, and of a model that spans GPUs
            return None
        alone: float = seen["backward_comm_time"] - seen["backward_compute_comm_overlap_time"]
        return max(0.0, alone / 1e9)
