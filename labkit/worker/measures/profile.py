"""Records a few steps of a run with torch's profiler if the launch or, later, the run's owner requests it: one trace
per rank in the profiler's own format, with marks for the phases of the step. Traces all allocations of one step, too,
if the launch requests it; that step is slow.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.worker.measures.memory import computing_device, live_optimizers
from labkit.worker.recorder import Recorder

SETTLED_STEPS = 4  # after the step that is traced for its memory
STEPS = 3  # after one warm-up step of the profiler
QUIET = "KINETO_LOG_LEVEL", "6"  # torch's profiler logs its start and stop to stderr; this is above all its levels
# Methods of a pipeline stage that compute one micro-batch, and the names of their spans.
CHUNKS = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weights",
}
TRACED_AFTER_STEPS = 2  # by then the optimizer has its state, and one-time allocations are done


class StepProfile:
    """Starts with the first batch that is fetched after SETTLED_STEPS, or, for a training without a DataLoader, at the
    end of a step; if somebody waits for it, with the next batch or step. All ranks record the same steps. `tell` is
    called at the end, with the reason if there is no profile.
    """

    def __init__(self, path: Path, steps: int = STEPS, tell: Callable[[str], None] | None = None):
        self._path, self._wanted, self._tell = path, steps, tell
        self._is_kept = True  # what it has recorded; an export replaces its file, even if that is a device
        self._due, self._done = tell is not None, False
        self._steps = 0  # steps that the profiler has seen
        self._fetches = self._turns = False  # whether steps start with a batch, and whether one is due
        self._profiler: Any = None
        self._backwards: list[Any] = []  # active passes: one may call another
        self._undo: list[Callable[[], None]] = []

    def before_fetch(self) -> None:
        if self._turns:
            self._turn()
        elif self._due and self._profiler is None:
            self._fetches = True
            self._begin()

    def before_backward(self) -> None:
        if self._profiler is not None:
            self._backwards.append(_span("labkit:backward"))
            self._backwards[-1].__enter__()

    def after_backward(self) -> None:
        if self._backwards:
            self._backwards.pop().__exit__(None, None, None)

    def after_counted_step(self, step: int) -> None:
        if self._done:
            return
        if self._profiler is not None:
            self._turns = self._fetches  # at the next fetch: the optimizer's step has not quite ended
            if not self._fetches:
                self._turn()
        elif self._due:
            self._begin()  # the step that has just ended fetched no batch
        else:
            self._due = step >= SETTLED_STEPS

    def _turn(self) -> None:
        self._turns = False
        self._steps += 1
        self._profiler.step()
        if self._steps == 1 + self._wanted:
            self.stop()

    def stop(self, why: str = "") -> None:
        """Stop the profiler, even if the training ends early; what it has recorded is kept, unless somebody waits for
        it and is told `why` it is not complete."""
        if self._done:
            return
        self._due, self._turns, self._done = False, False, True
        if self._tell is not None and self._steps <= self._wanted:
            why = why or f"the training ended before {self._wanted} steps were recorded"
        if why:
            self._is_kept = False
        try:
            if self._profiler is not None:
                profiler, self._profiler = self._profiler, None
                profiler.stop()
        except Exception as error:  # a full disk
            why = why or f"torch's profiler failed: {error}"
            raise
        finally:
            while self._undo:
                self._undo.pop()()
            if self._tell is not None:
                self._tell(why)

    def _begin(self) -> None:
        was_set = QUIET[0] in os.environ
        os.environ.setdefault(*QUIET)
        try:
            self._start()
        except Exception as error:  # the script has started a profiler of its own
            self._profiler = None
            self.stop(f"torch's profiler did not start: {error}")
            raise
        finally:
            if not was_set:
                os.environ.pop(QUIET[0], None)

    def _start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile, schedule

        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_initialized() else [])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._mark_waits(torch.distributed)
        self._mark_chunks(sys.modules.get("torch.distributed.pipelining.stage"))
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=self._wanted, repeat=1),
            on_trace_ready=lambda profiler: self._is_kept and profiler.export_chrome_trace(str(self._path)),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.10 warns that a further cycle, which there is not, clears events
            self._profiler.start()

    def _mark_waits(self, distributed: Any) -> None:
        if distributed.is_available():
            self._replace(distributed.Work, "wait", lambda *_, **__: "labkit:wait")

    def _mark_chunks(self, stages: Any) -> None:
        for method, what in CHUNKS.items() if stages else ():
            self._replace(
                stages._PipelineStageBase,
                method,
                lambda stage, *chunk, what=what, **_: f"labkit:{what} {stage.stage_index} {[*chunk, 0][0]}",
            )

    def _replace(self, owner: Any, name: str, title: Callable[..., str]) -> None:
        """Record calls of this method as spans with that title until the profile ends."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with _span(title(*args, **kwargs)):
                return method(*args, **kwargs)

        setattr(owner, name, marked)
        self._undo.append(lambda: setattr(owner, name, method))


def _span(title: str) -> Any:
    from torch.profiler import record_function

    return record_function(title)


class StepTrace:
    """Starts with the first batch that is fetched after TRACED_AFTER_STEPS, or, for a training without a DataLoader, at
    the end of a step, and writes one record when the next step ends.
    """

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._optimizer: Any = None  # the counted optimizer, after TRACED_AFTER_STEPS
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
        elif step >= TRACED_AFTER_STEPS:
            self._optimizer = optimizer

    def stop(self) -> None:
        """Stop tracing, even if the training ends early."""
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
