"""How long this rank waits for collectives: the part of communication that its computation does not hide.

Three places cover all strategies: `Work.wait`, where FSDP, ZeRO, pipelines and a script's own collectives
wait; `wait_tensor`, where DTensor's do (tensor parallel); and DDP's own log, because its reducer waits in C++.

On CUDA a wait is queued on the stream and the host continues, so that only DDP's log, timed by events, is known.
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
        self._thread = threading.get_ident()  # an asynchronous checkpoint waits in another thread
        self._replicated: Callable[[], Any] = lambda: None  # weak reference to the newest DDP model

    def hook(self, torch: Any) -> None:
        """Hook torch before the script runs; its process group may be created later, or never."""
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
        """Hook DTensor if the script has loaded it; importing its module would take a second."""
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
        """Seconds that DDP's newest sampled backward continued after its computation; None without DDP.

        torch samples the first ten backward passes and then every hundredth.
        """
        model = self._replicated()
        if model is None:
            return None
        log = model._get_ddp_logging_data()  # nanoseconds
        if "backward_comm_time" not in log:  # missing before the second forward, and for a model that spans GPUs
            return None
        alone: float = log["backward_comm_time"] - log["backward_compute_comm_overlap_time"]
        return max(0.0, alone / 1e9)
