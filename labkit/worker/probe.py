"""Observes steps, loss, samples, times and memory of any torch training script, without a change to the script.

The hooks (hooks.py) call it. On a step that is not recorded it only reads the clock and adds; at most ten times a
second it writes one line to the rank's `metrics.jsonl`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from labkit.worker.hooks import hook
from labkit.worker.measures.communication import Communication
from labkit.worker.measures.device_clock import DeviceClock
from labkit.worker.measures.losses import SEVERAL_OPTIMIZERS, StepLoss
from labkit.worker.measures.memory import allocator, held_by, host_memory, optimizers, resident_set
from labkit.worker.measures.profile import StepProfile
from labkit.worker.measures.trace import StepTrace
from labkit.worker.optimizers import Optimizers
from labkit.worker.reach.requests import Reach
from labkit.worker.reach.settings import Settings
from labkit.worker.recorder import Recorder

__all__ = ["Probe"]

clock = time.perf_counter

RECORD_SECONDS = 0.1
UNCONSUMED_BATCHES = 4096  # batch sizes; scripts may fetch all micro-batches of a step at once
UNREAD_RECORDS = 64
LAST_RECORDS_SECONDS, POLL_SECONDS = 0.5, 0.001  # for the device to finish the steps of the last records
FIRST_STEPS = 100  # their losses are always kept, because the training may be short


class Probe:
    """One rank's observer. `step` counts the steps of the training (see optimizers.py). If `profile` is set, a few
    steps are recorded there with torch's profiler; if `traces`, one step's allocations are traced.
    """

    def __init__(self, path: Path, profile: Path | None = None, *, traces: bool = False):
        self.step = 0
        self.recorder = Recorder(path)
        self.resident = resident_set()
        self._memory: Callable[[], dict[str, float]] = self.resident
        self._optimizer: Any = None  # the outermost optimizer whose step() is running
        self._optimizers = Optimizers()
        self.passes = 0  # backward passes since any optimizer's last step
        self._most = 0  # most passes in a step so far
        self._whole = 0  # complete passes since the last step
        self._batches: deque[int] = deque(maxlen=UNCONSUMED_BATCHES)
        self._losses: StepLoss | None = None  # of the passes since the last step, if they are kept
        self._loss: StepLoss | None = None  # of the newest step
        self._latest = math.inf  # seconds of the newest step
        self._evaluates = False
        self._step_started = self._step_ended = self._fetched = self.stepping = 0.0  # marks on the clock within a step
        self._communication = Communication()
        self._waited = self._waited_before = 0.0  # for collectives: until the last mark, and until this step
        self._place: dict[str, Any] = {}
        self._device_clock: Callable[[], DeviceClock] | None = None  # once the script trains on CUDA
        self._timed: DeviceClock | None = None  # while a step on CUDA is timed
        self._measured: DeviceClock | None = None  # of the newest timed step of this record
        self._waiting: deque[tuple[dict[str, Any], DeviceClock, float | None]] = deque(maxlen=UNREAD_RECORDS)
        self._trace = StepTrace(self.recorder) if traces else None
        self._profile = StepProfile(profile) if profile is not None else None
        self.settings = Settings()
        self.reach: Reach | None = None  # if the run's owner may ask
        self._open_window()

    def _open_window(self) -> None:
        """Start to sum up the steps of the next record."""
        self._n = self._samples = 0
        self._seconds = self._slowest = 0.0
        self._fastest = math.inf
        self._input = self._forward = self._backward = self._stepped = self._communicated = 0.0
        self._due = clock() + RECORD_SECONDS

    def start(self, torch: Any, header: Mapping[str, Any]) -> None:
        """Write the header and hook torch.

        It does not touch CUDA: even checking for CUDA would fix which devices this process sees.
        """
        resident = self.resident()["rss"]  # Python and torch, before there is a model
        self.recorder.write({"k": "meta", "v": 1, **header, "resident": resident, "torch": torch.__version__})
        try:
            hook(torch, self, [watching.before_fetch for watching in (self._trace, self._profile) if watching])
            self._communication.hook(torch)
        except Exception as error:
            self.recorder.drop(error)
        self._step_started = clock()

    @property
    def moved(self) -> float:
        """When the script last fetched a batch, finished a backward or a step, on the monotonic clock."""
        return max(self._step_started, self._fetched, self.stepping)

    @property
    def doing(self) -> str:
        """`preparing`, `first step`, `training` or `evaluating`, as far as the hooks can tell."""
        if self._evaluates:
            return "evaluating"
        return "training" if self.step else "first step" if self._fetched else "preparing"

    @property
    def latest_step_seconds(self) -> float | None:
        return None if self._latest == math.inf else self._latest

    def finish(self, outcome: str) -> None:
        """Write the remaining records and how the script ended. Never raises, never waits long for the device."""
        try:
            for watching in (self._trace, self._profile):
                if watching is not None:
                    watching.stop()
            if self._n:
                self._record()
            deadline = clock() + LAST_RECORDS_SECONDS
            while self._flush() and clock() < deadline:
                time.sleep(POLL_SECONDS)
            if self._waiting:
                raise TimeoutError(f"the device had not finished the steps of {len(self._waiting)} record(s)")
        except Exception as error:
            self.recorder.drop(error)
        end = {"k": "end", "step": self.step, "outcome": outcome, "dropped": self.recorder.dropped}
        end |= {"problem": self.recorder.problem} if self.recorder.dropped else {}
        self.recorder.write(end if self.step else end | {"passes": self.passes})

    def leave(self) -> None:
        """In a forked child: record and answer nothing."""
        self.recorder.file.let_go()
        self.reach = self._trace = self._profile = None

    # Called by the hooks. They are on the step path: read the clock, add, return.

    def after_fetch(self, started: float, loader: Any, batch: Any) -> None:
        if not self.step and not self._fetched:  # building model and data is not part of the first step
            self._begin_step(started)
        # Stored on the iterator, so that an evaluation's batches never mix with the training's.
        batches = loader.__dict__.get("_labkit_batches")
        if batches is None:
            batches = loader.__dict__["_labkit_batches"] = deque(maxlen=UNCONSUMED_BATCHES)
            loader.__dict__["_labkit_most"] = _most_samples(loader)
        batches.append(min(_length(batch), loader.__dict__["_labkit_most"]))
        self._batches = batches
        self._fetched = now = clock()
        self._evaluates = False
        self._input += now - started
        self._waited = self._communication.waited
        if self._timed is not None:
            self._timed.begin()

    def after_evaluation_fetch(self) -> None:
        if not self._evaluates:
            self._evaluates = True
            if self._n:
                self._record()  # do not hold back the last steps before the evaluation
            if self._device_clock is not None:
                self._timed = self._device_clock()
        self._begin_step(clock())  # an evaluation is not part of the next step
        if self._timed is not None:
            self._timed.begin()

    def before_backward(self, loss: Any) -> None:
        """`loss` is None for a partial pass: zero-bubble pipelines differentiate by inputs, later by weights."""
        if self._timed is not None:
            self._timed.end("forward")
        if self._profile is not None:
            self._profile.before_backward()
        self._evaluates = False
        now = clock()
        self._forward += now - (self._fetched or self._step_started) - self._waiting_since_mark()
        if not self.passes:
            # it will probably be written
            is_needed = now + self._latest >= self._due or self.step < self._optimizers.start + FIRST_STEPS
            self._losses = StepLoss(alone=self._most == 1) if is_needed else None
        self.passes += 1
        if self._losses is not None and loss is not None:
            self._losses.add(loss, self._batches[0] if self._batches else None, self._optimizer is not None)
        self._fetched = now

    def after_backward(self, whole: bool) -> None:
        if self._profile is not None:
            self._profile.after_backward()
        now = clock()
        self._backward += now - self._fetched - self._waiting_since_mark()
        self._fetched = now  # another micro-batch may follow without a DataLoader
        self._communication.after_backward()
        if self._timed is not None:
            self._timed.end("backward")
        if not whole:
            return
        self._whole += 1
        if self._batches:
            self._samples += self._batches.popleft()

    def before_step(self, optimizer: Any) -> None:
        # A wrapping optimizer (ZeRO, accelerate) steps another one inside; the outermost counts.
        if self._optimizer is None or self._optimizer is optimizer:
            self._optimizer = optimizer
            self._waited = self._communication.waited
            if not self.step:
                self._restore_settings(optimizer)
            if self.settings.pinned and self._optimizers.counted() in (optimizer, None):
                self.settings.pin(optimizer)
            self.stepping = clock()
            if self._timed is not None:
                self._timed.begin()
            if self._trace is not None:
                self._trace.before_step(optimizer)

    def _restore_settings(self, optimizer: Any) -> None:
        try:
            self.settings.restore(optimizer)
        except Exception as error:  # a checkpoint of another optimizer, a full disk
            self.recorder.drop(error)

    def after_step(self, optimizer: Any) -> None:
        if optimizer is not self._optimizer:
            return
        self._optimizer = None
        now = clock()
        if self._trace is not None:
            self._trace.after_step(optimizer)
        passes, self.passes = self.passes, 0
        if passes > self._most:
            self._most = passes
        counted, several = self._optimizers.counted, self._optimizers.several
        steps = self._optimizers.steps_made(optimizer, passes, self.step)
        if self._optimizers.counted is not counted:
            self._begin_training(passes)
        if not steps:
            return
        self._stepped += now - self.stepping - self._waiting_since_mark()
        self._communicated += self._waited - self._waited_before
        if self._timed is not None:
            self._timed.end("optimizer")
            self._measured = self._timed
        seconds = now - self._step_started
        self._seconds += seconds
        if steps > 1:
            seconds /= steps
        self._latest = seconds
        self.step += steps
        self._n += steps
        if seconds < self._fastest:
            self._fastest = seconds
        if seconds > self._slowest:
            self._slowest = seconds
        self._begin_step(now)
        self._step_ended = now
        self._fetched = 0.0
        self._loss = self._losses
        if passes and not self._whole:  # it is unknown which part belongs to which batch, so this step gets all of them
            self._samples += sum(self._batches)
            self._batches.clear()
        self._whole = 0
        if self.step == steps:
            self._find_device(optimizer)
            self._record_model()
        elif self._optimizers.several > several:  # now each has its state
            self._record_model()
        if now >= self._due:
            self._record()
        if self._trace is not None:
            self._trace.after_counted_step(self.step, optimizer)
        if self._profile is not None:
            self._profile.after_counted_step(self.step)
        if self._device_clock is not None:  # events on every step would be too expensive
            will_be_last = now + self._latest >= self._due
            self._timed = self._device_clock() if will_be_last or not self._n else None
        if self.reach is not None and (self.reach.flagged or self.step >= self.reach.due):
            self.reach.at_boundary(optimizer, self.step, self._latest, alone=not self._optimizers.several)
            self._begin_step(clock())  # the time that it took is not part of the next step

    def _begin_training(self, passes: int) -> None:
        """Another optimizer's steps are counted from this one on, which followed `passes` backward passes."""
        self._most = passes
        if not passes:
            self._losses = StepLoss(alone=True)

    def _begin_step(self, now: float) -> None:
        self._step_started = now
        self._waited = self._waited_before = self._communication.waited

    def _waiting_since_mark(self) -> float:
        """Seconds spent waiting for collectives since the last mark; sets the next mark."""
        before, self._waited = self._waited, self._communication.waited
        return self._waited - before

    # Off the step path: called at most ten times a second.

    def _find_device(self, optimizer: Any) -> None:
        """After the first step the script has chosen its device."""
        import torch

        device = next(p for group in optimizer.param_groups for p in group["params"]).device  # a group may be empty
        if device.type == "cpu" and torch.cuda.is_initialized():  # offloaded: the step is computed on the GPU
            device = torch.device("cuda", torch.cuda.current_device())
        self._place = {"device": str(device), "limit": host_memory()}
        if device.type == "cuda":
            self._memory = allocator(torch, device)
            self._device_clock = lambda: DeviceClock(torch, device)
            properties = torch.cuda.get_device_properties(device)
            self._place |= {"limit": properties.total_memory, "uuid": str(getattr(properties, "uuid", ""))}
        self._communication.hook_functional()

    def _record_model(self) -> None:
        """Write what this rank holds and where."""
        self.recorder.write({"k": "model"} | self._place | held_by(optimizers()))

    def _record(self) -> None:
        self._flush()
        record = {
            "k": "step",
            "t": time.monotonic() - (clock() - self._step_ended),  # of the step, even if it is written later
            "step": self.step,
            "n": self._n,
            "seconds": [self._seconds, self._fastest, self._slowest],
            "samples": self._samples,
            "input": self._input,
            "forward": self._forward,
            "backward": self._backward,
            "optimizer": self._stepped,
            "communication": self._communicated,
        } | self._memory()
        in_backward = self._communication.in_backward(self._n)
        loss, what = self._loss_of_step()
        if what is not None:
            record |= {"loss_of": what} if loss is not None else {"loss": None, "loss_of": what}
            if what is SEVERAL_OPTIMIZERS:
                record["void_after"] = self._optimizers.start
        if self._optimizers.trainings > 1:
            record["training"] = self._optimizers.trainings
        if self._device_clock is not None:
            # the host measured only the queueing
            record |= dict.fromkeys(("forward", "backward", "optimizer", "communication"))
            timed, self._measured = self._measured or self._device_clock(), None
            if loss is not None:
                timed.keep(loss)
            self._waiting.append((record, timed, in_backward))
        else:
            self._write(record if loss is None else record | {"loss": float(loss)}, in_backward)
        self._open_window()

    def _loss_of_step(self) -> tuple[Any, str | None]:
        """The newest step's loss and its description, both None if it was not kept."""
        losses, self._loss = self._loss, None
        if self._optimizers.mixed:
            return None, SEVERAL_OPTIMIZERS
        try:
            return losses.total(self._most, self._optimizers.several) if losses is not None else (None, None)
        except RuntimeError as error:  # tensors on several devices
            self.recorder.drop(error)
            return None, None

    def _flush(self) -> int:
        """Write the records whose step the device has finished; a device that hangs keeps them forever. Returns how
        many remain."""
        while self._waiting and self._waiting[0][1].is_done:
            record, timed, in_backward = self._waiting.popleft()
            self._write(record | timed.read(record["n"]), in_backward)
        return len(self._waiting)

    def _write(self, record: dict[str, Any], in_backward: float | None) -> None:
        if in_backward is not None and record["backward"] is not None:  # the phases exclude each other
            communicated = min(in_backward, record["backward"])
            record["backward"] -= communicated
            record["communication"] = (record["communication"] or 0.0) + communicated
        self.recorder.write(record)


def _most_samples(loader: Any) -> float:
    """How many samples the iterator of a DataLoader collates at most; infinity if it does not say. A batch of graphs,
    in which all nodes follow each other, is longer."""
    sampler = getattr(loader, "_index_sampler", None)  # of indices, in lists
    if isinstance(sampler, list) and sampler and isinstance(sampler[0], list | tuple | range):
        return max(map(len, sampler))
    size = getattr(sampler, "batch_size", None)
    return size if isinstance(size, int) else math.inf


def _length(batch: Any) -> int:
    """How many samples a batch has: the first dimension of its first tensor."""
    while isinstance(batch, list | tuple | dict) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape else 0
