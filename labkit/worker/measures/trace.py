"""Traces all allocations of one step of a run, if the launch requests it. That step is slow."""

from __future__ import annotations

import gc
import sys
from typing import Any

from labkit.worker.measures.memory import computing_device, live_optimizers
from labkit.worker.recorder import Recorder

__all__ = ["StepTrace"]

SETTLED_STEPS = 2  # by then the optimizer has its state, and one-time allocations are done


class StepTrace:
    """Starts with the first batch that is fetched after SETTLED_STEPS, or, for a training without a DataLoader, at the
    end of a step, and writes one record when the next step ends.
    """

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._optimizer: Any = None  # the counted optimizer, after SETTLED_STEPS
        self._tracker: Any = None
        self._done = False

    def before_fetch(self) -> None:
        if self._optimizer is not None and self._tracker is None:
            self._begin()

    def before_step(self, optimizer: Any) -> None:
        if self._tracker is not None:
            self._tracker.before_step(optimizer)

    def after_step(self, optimizer: Any) -> None:
        """Called for every optimizer, not only the counted one."""
        if self._tracker is not None:
            self._tracker.after_step(optimizer)

    def after_counted_step(self, step: int, optimizer: Any) -> None:
        if self._done:
            return
        if in_backward():
            self._give_up("the optimizer steps during backward(), so no operation marks the start or end of a step")
        elif self._tracker is not None:
            self._recorder.write(
                {"k": "memory", "step": step, "missed": self._tracker.missed} | self._tracker.peak()._asdict()
            )
            self.stop()
        elif self._optimizer is not None:
            self._begin()  # the step that has just ended fetched no batch
        elif step >= SETTLED_STEPS:
            self._optimizer = optimizer

    def stop(self) -> None:
        """Stop tracing, also if the training ends early."""
        if self._tracker is not None:
            self._tracker.__exit__(None, None, None)
        self._optimizer = self._tracker = None
        self._done = True

    def _give_up(self, why: str) -> None:
        self._recorder.write({"k": "untraced", "why": why})
        self._optimizer = None
        self._done = True

    def _begin(self) -> None:
        import torch

        from labkit.worker.measures.tracker import Tracker

        if torch._dynamo.utils.counters["frames"]["ok"]:  # compiled code allocates without the dispatcher
            self._give_up("the model is compiled, so its allocations cannot be traced")
            return
        gc.collect()
        modules = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
        first = next(p for group in self._optimizer.param_groups for p in group["params"])
        self._tracker = Tracker(computing_device(torch, first.device).type)
        self._tracker.mark_training(modules, live_optimizers())
        self._tracker.__enter__()


def in_backward() -> bool:
    """Whether autograd is calling: there a dispatch mode would end with the function that entered it."""
    return bool(sys.modules["torch"]._C._current_graph_task_id() != -1)
