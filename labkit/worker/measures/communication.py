"""Measures how long this rank waits for collectives: the part of communication that its computation does not hide.

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

from labkit.worker.frames import invisible

clock = time.perf_counter

RELEASE_SECONDS = 0.05


class Communication:
    """`waited` is how many seconds the script's main thread has waited so far."""

    def __init__(self) -> None:
        self.waited = 0.0
        self._thread = threading.get_ident()  # an asynchronous checkpoint waits in another thread
        self._replicated: Callable[[], Any] = lambda: None  # weak reference to the newest DDP model
        self._on_cpu = False
        self.added = 0.0  # seconds that DDP has waited in backward passes on a CPU since the last record
        self._newest: int | None = None  # when its newest all-reduce started

    def hook(self, torch: Any) -> None:
        """Hook torch before the script runs; its process group may be created later, or never."""
        if not torch.distributed.is_available():
            return
        torch.distributed.Work.wait = self._timed(torch.distributed.Work.wait)
        _release_before_destroying(torch.distributed)

    def wrapped(self, model: Any) -> None:
        """Measure a model that DDP has wrapped."""
        self._replicated, self._on_cpu = weakref.ref(model), model.device_type == "cpu"
        if self._on_cpu:
            model._set_ddp_runtime_logging_sample_rate(1)

    def hook_functional(self) -> None:
        """Hook DTensor if the script has loaded it; importing its module would take a second."""
        functional: Any = sys.modules.get("torch.distributed._functional_collectives")
        if functional is not None:
            functional.wait_tensor = self._timed(functional.wait_tensor)

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        @invisible
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = clock()
            try:
                return wait(*args, **kwargs)
            finally:
                if threading.get_ident() == self._thread:
                    self.waited += clock() - started

        return timed

    def after_backward(self) -> None:
        """Add up what DDP's backward passes on a CPU wait for."""
        if not self._on_cpu or (model := self._replicated()) is None:
            return
        model.logger.set_runtime_stats_and_log()  # otherwise the next forward does it
        log = model._get_ddp_logging_data()
        if (started := log.get("backward_comm_time_start")) != self._newest:
            self._newest = started  # another pass may have been without DDP, or without its all-reduce
            self.added += _alone(log)

    def in_backward_on_device(self, steps: int) -> float | None:
        """Seconds that DDP's backward passes of the newest `steps` steps on a GPU continued after their computation;
        None without DDP.

        All count like the newest sample: torch samples the first ten passes and then every hundredth, because it waits
        for the GPU.
        """
        if (model := self._replicated()) is None:
            return None
        log = model._get_ddp_logging_data()
        # missing before the second forward, and for a model that spans GPUs
        return _alone(log) * steps if "backward_comm_time" in log else None


def _release_before_destroying(distributed: Any) -> None:
    """Have `destroy_process_group` give up the GIL first. In torch 2.13 gloo's threads need it to free the collectives
    of backward passes, and freeing the group afterwards joins them with the GIL held: a deadlock. The flight recorder
    makes it likely, because it slows these threads down."""
    destroy = distributed.destroy_process_group

    @functools.wraps(destroy)
    @invisible
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        time.sleep(RELEASE_SECONDS)
        destroy(*args, **kwargs)

    distributed.destroy_process_group = destroy_process_group


def _alone(log: dict[str, int]) -> float:
    """The seconds that computation does not hide, from DDP's `log`, which is in nanoseconds."""
    return max(0.0, (log["backward_comm_time"] - log["backward_compute_comm_overlap_time"]) / 1e9)
