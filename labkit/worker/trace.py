"""Follow one step of a run through all that it allocates, when the launch asks for it. That step is slow."""

from __future__ import annotations

import gc
from typing import Any

from labkit.worker.recorder import Recorder

__all__ = ["ASKED", "StepTrace"]

ASKED = "LABKIT_TRACE_MEMORY"  # in the ranks' environment
TRACED_STEP = 3  # the optimizer has its state, and what first steps make is made


class StepTrace:
    """Begins when the step before the traced one ends, and writes one record when that has ended, too."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._tracker: Any = None

    def before_step(self, optimizer: Any) -> None:
        if self._tracker is not None:
            self._tracker.before_step(optimizer)

    def after_step(self, step: int, optimizer: Any) -> None:
        if self._tracker is not None:
            self._tracker.after_step(optimizer)
        if step == TRACED_STEP - 1:
            self._begin(optimizer)
        elif step == TRACED_STEP and self._tracker is not None:
            self._end(step)

    def _begin(self, optimizer: Any) -> None:
        import torch

        from labkit.worker.tracker import Tracker

        if torch.compiler.is_compiling() or torch._dynamo.utils.counters["frames"]["ok"]:
            return  # what compiled code allocates passes no dispatcher
        device = optimizer.param_groups[0]["params"][0].device.type  # of what is offloaded, the CPU
        gc.collect()
        modules = [thing for thing in gc.get_objects() if isinstance(thing, torch.nn.Module)]
        self._tracker = Tracker("cuda" if torch.cuda.is_initialized() else device)
        self._tracker.mark_training(modules, [optimizer])
        self._tracker.__enter__()

    def _end(self, step: int) -> None:
        self._tracker.__exit__(None, None, None)
        self._recorder.write({"k": "memory", "step": step} | self._tracker.peak()._asdict())
        self._tracker = None
