"""Observes steps, loss, samples, times and memory of any torch training script, without a change to the script.

The hooks (hooks.py) call it. On a step that is not recorded it only reads the clock and adds; at most ten times a
second it writes one line to the rank's `metrics.jsonl`.
"""

from __future__ import annotations

import math
import time
from _thread import allocate_lock, get_ident
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from labkit.worker.hooks import Optimizers, hook
from labkit.worker.measures.communication import Communication
from labkit.worker.measures.device_clock import DeviceClock, Unfinished
from labkit.worker.measures.loader_workers import seconds_of_start
from labkit.worker.measures.memory import (
    allocator,
    computing_device,
    held_by,
    host_memory,
    live_optimizers,
    resident_set,
)
from labkit.worker.measures.profile import StepProfile, StepTrace, in_backward
from labkit.worker.measures.samples import Batches, take_index
from labkit.worker.measures.step_loss import SEVERAL_OPTIMIZERS, StepLoss
from labkit.worker.reach.requests import Reach
from labkit.worker.reach.settings import Settings
from labkit.worker.recorder import Recorder
from labkit.worker.witness.witness import Witness

clock = time.perf_counter

RECORD_SECONDS = 0.1
TELL_SECONDS = 0.5  # after a step, at the next `tick`, it is written that the device has not finished it
LAST_RECORDS_SECONDS, POLL_SECONDS = 0.5, 0.001  # for the device to finish the steps of the last records
DEVICE_PHASES = ("forward", "backward", "optimizer", "communication")
SUMMED = ("n", "samples", "uncounted", "input", "restarts", *DEVICE_PHASES, "in_backward")
FIRST_STEPS = 100  # their losses are always kept, because the training may be short


class Probe:
    """One rank's observer. `step` counts the steps of the training (see hooks.Optimizers). If `profile` is set, a few
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
        self._batches = Batches()
        self.fetching: Any = None  # the DataLoader's iterator that the script waits for
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
        self._unfinished = Unfinished(self._write)
        self._writing = allocate_lock()  # held while a record is written; the training never waits for it
        self._is_adding = False  # whether a step is being added to the sums
        self._thread: int | None = None  # the training's, from its first step on
        self._trace = StepTrace(self.recorder) if traces else None
        self._profile = StepProfile(profile) if profile is not None else None
        self._before_fetches: list[Callable[[], None]] = [
            watching.before_fetch for watching in (self._trace, self._profile) if watching
        ]
        self.settings = Settings()
        self.reach: Reach | None = None  # if the run's owner may ask
        self.witness: Witness | None = None  # unless the launch has turned it off
        self._open_window()

    def _open_window(self) -> None:
        """Start to sum up the steps of the next record."""
        self._told: dict[str, Any] | None = None  # the sums that `tick` has written since
        self._n = self._uncounted = 0  # the steps, and those whose samples are unknown
        self._samples: float = 0
        self._restarts = 0.0  # the part of the waits for input in which workers were started again
        self._seconds = self._slowest = 0.0
        self._fastest = math.inf
        self._input = self._forward = self._backward = self._stepped = self._communicated = 0.0
        self._communication.added = 0.0
        self._due = clock() + RECORD_SECONDS

    def start(self, torch: Any) -> None:
        """Hook torch. It does not touch CUDA: even checking for CUDA would fix which devices this process sees."""
        try:
            hook(torch, self, self._before_fetches)
            self._communication.hook(torch)
            if self.witness is not None:
                self.witness.hook()
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

    @property
    def awaited_worker(self) -> int | None:
        """The pid of the DataLoader's worker that makes the batch that the script waits for."""
        with suppress(Exception):  # torch's own names, changed by another thread
            own = self.fetching.__dict__
            worker, *_ = own["_task_info"][own["_rcvd_idx"]]
            return int(own["_workers"][worker].pid)
        return None

    def finish(self, outcome: str, line: int | None = None) -> None:
        """Write the remaining records and how the script ended, in which of its lines. Never raises, never waits long
        for the device."""
        if self.witness is not None:
            self.witness.finish()
        try:
            for watching in (self._trace, self._profile):
                if watching is not None:
                    watching.stop()
            deadline = clock() + LAST_RECORDS_SECONDS
            if self._writing.acquire(timeout=LAST_RECORDS_SECONDS):
                try:
                    if self._n:
                        self._record_sums()
                    while self._unfinished.flush() and clock() < deadline:
                        time.sleep(POLL_SECONDS)
                    self._unfinished.tell()
                finally:
                    self._writing.release()
            if self._unfinished:
                raise TimeoutError(f"the device had not finished the steps of {len(self._unfinished)} record(s)")
        except Exception as error:
            self.recorder.drop(error)
        end = {"k": "end", "step": self.step, "outcome": outcome, "dropped": self.recorder.dropped}
        end |= {"line": line} if line else {}
        end |= {"problem": self.recorder.problem} if self.recorder.dropped else {}
        self.recorder.write(end if self.step else end | {"passes": self.passes})

    def leave_out(self, seconds: float) -> None:
        """Do not count these last seconds, in which the ranks stayed at a line of the script, as part of the step."""
        self._step_started += seconds
        if self._fetched:
            self._fetched += seconds
        if self._optimizer is not None:
            self.stepping += seconds
        if self.fetching is not None:
            self._input -= seconds
        self._timed = None  # the device's clock has gone on

    def record_profile(self, path: Path, steps: int, tell: Callable[[str], None]) -> None:
        """Profile the next steps, in place of a profile that is being recorded. `tell` is called at the end, with the
        reason if there is none."""
        self.end_profile("another profile took its place")

        def ended(why: str) -> None:
            self._profile = None  # from here on it costs nothing, as before
            self._before_fetches.remove(profile.before_fetch)
            tell(why)

        profile = self._profile = StepProfile(path, steps, ended)
        self._before_fetches.append(profile.before_fetch)

    def end_profile(self, why: str) -> None:
        if self._profile is not None:
            self._profile.stop(why)

    def leave(self) -> None:
        """Record and answer nothing in a forked child."""
        self.recorder.file.let_go()
        if self.witness is not None:
            self.witness.forked()
        if self.reach is not None:
            self.reach.lines.leave()
        self.reach = self._trace = self._profile = self.witness = None

    # Called by the hooks. They are on the step path: read the clock, add, return.

    def after_fetch(self, started: float, iterator: Any, batch: Any) -> None:
        if self._thread != get_ident() and self._thread is not None:
            self._batches.fetched(iterator, batch, elsewhere=True)  # the training does not wait for it
            if self.witness is not None:
                self.witness.batches.after_fetch(iterator, batch, is_training=True)
            return
        if not self.step and not self._fetched:  # building model and data is not part of the first step
            self._begin_step(started)
        self._batches.fetched(iterator, batch)
        self._fetched = now = clock()
        self._evaluates = False
        self._input += now - started
        self._restarts += seconds_of_start(iterator, started, now)
        self._waited = self._communication.waited
        if self._timed is not None:
            self._timed.begin()
        if self.witness is not None:
            self.witness.after_fetch(iterator, batch, is_training=True)

    def after_draw(self, iterator: Any, index: Any) -> None:
        """Called when a sampler has given the index of a batch, or has no more: None."""
        if index is not None:
            take_index(iterator, index)
        if self.witness is not None:
            self.witness.batches.after_draw(iterator, index)

    def before_forward(self, model: Any, inputs: Any) -> None:
        """Called when a DDP model is called."""
        if self.witness is not None:
            self.witness.before_forward(model, inputs)

    def after_last_fetch(self, iterator: Any) -> None:
        self._batches.ended(iterator)

    def after_evaluation_fetch(self, iterator: Any, batch: Any) -> None:
        if not self._evaluates:
            self._evaluates = True
            if self._n:
                self._record()  # do not hold back the last steps before the evaluation
            if self._device_clock is not None:
                self._timed = self._device_clock()
        if self.witness is not None:
            self.witness.after_fetch(iterator, batch, is_training=False)
        self._begin_step(clock())  # an evaluation is not part of the next step
        if self._timed is not None:
            self._timed.begin()

    def before_backward(self, loss: Any, gradient: Any = None) -> None:
        """`gradient` is what backward() was given, if anything. `loss` is None for a partial pass: zero-bubble
        pipelines differentiate by inputs, later by weights."""
        if self._timed is not None:
            self._timed.end("forward")
        if self._profile is not None:
            self._profile.before_backward()
        self._evaluates = False
        now = clock()
        self._forward += now - (self._fetched or self._step_started) - self._waiting_since_mark()
        if not self.passes:
            # this step will probably be recorded
            is_needed = now + self._latest >= self._due or self.step < self._optimizers.start + FIRST_STEPS
            self._losses = StepLoss(alone=self._most == 1) if is_needed else None
        self.passes += 1
        if self._losses is not None and loss is not None:
            batch = self._batches.of_pass(self._whole)
            self._losses.add(loss, batch, self._optimizer is not None, gradient)
        if self.witness is not None and loss is not None:
            self.witness.before_backward(loss)
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
        if whole:
            self._whole += 1
            if self.witness is not None:
                self.witness.after_backward()

    def wrapped(self, model: Any) -> None:
        """Called when DDP has wrapped a model."""
        self._communication.wrapped(model)
        if self.witness is not None:
            self.witness.wrapped(model)

    def loaded(self, module: Any) -> None:
        """Called when the script has loaded weights into a module."""
        if self.witness is not None:
            self.witness.loaded(module)

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
            if self.witness is not None:
                self.witness.before_step(optimizer)

    def _restore_settings(self, optimizer: Any) -> None:
        try:
            self.settings.restore(optimizer)
        except Exception as error:  # a checkpoint of another optimizer, a full disk
            self.recorder.drop(error)

    def after_step(self, optimizer: Any) -> None:
        if optimizer is not self._optimizer:
            return
        self._optimizer = None
        self._count_step(optimizer, clock())
        if self.witness is not None:
            self.witness.after_step(optimizer, self.step)

    def _count_step(self, optimizer: Any, now: float) -> None:
        """Add a step of an optimizer that no other one wraps, which ended `now`, if it is one of the training's."""
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
        self._is_adding = True
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
        samples = self._batches.of_step(self._whole)
        if samples == samples:
            self._samples += samples
        else:
            self._uncounted += 1
        self._whole = 0
        self._is_adding = False
        if self.step == steps or self._optimizers.several > several:  # now each has its state
            self._record_model(optimizer if self.step == steps else None)
        if now >= self._due:
            self._find_thread()
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
        """Count another optimizer's steps from this one on, which followed `passes` backward passes."""
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

    def _record_model(self, first: Any) -> None:
        """Write what this rank holds and where, after the step of its `first` optimizer or of another one."""
        import torch

        with torch._C.DisableTorchFunction():  # the script's modes do not see it
            if first is not None:
                self._find_device(torch, first)
            self.recorder.write({"k": "model"} | self._place | held_by(live_optimizers()))

    def _find_device(self, torch: Any, optimizer: Any) -> None:
        """Find the device, which the script has chosen by its first step."""
        first = next(p for group in optimizer.param_groups for p in group["params"])  # a group may be empty
        device = computing_device(torch, first.device)
        self._find_thread()
        self._place = {"device": str(device), "limit": host_memory()}
        if device.type == "cuda":
            self._memory = allocator(torch, device)
            self._device_clock = lambda: DeviceClock(torch, device)
            properties = torch.cuda.get_device_properties(device)
            self._place |= {"limit": properties.total_memory, "uuid": str(getattr(properties, "uuid", ""))}
        self._communication.hook_functional()

    def _find_thread(self) -> None:
        if not in_backward():  # on a GPU a thread of autograd's makes steps within backward()
            self._thread = get_ident()

    def tick(self) -> None:
        """Write the newest steps if no further step has come to do so. Never raises. Another thread than the training's
        calls this about once a second; neither waits for the other. It leaves the device to the training's thread."""
        if clock() < self._due or not self._writing.acquire(blocking=False):
            return
        try:
            self._unfinished.tell(TELL_SECONDS)
            step, sums, losses = self.step, self._sums(), self._loss
            if not self._is_adding and self.step == step:  # otherwise a step has just ended
                self._record_early(sums, losses)
        except Exception as error:
            self.recorder.drop(error)
        finally:
            self._writing.release()

    def _record_early(self, sums: dict[str, Any], losses: StepLoss | None) -> None:
        new = _without(sums, self._told)
        if not new["n"]:
            return
        if self._device_clock is None:
            is_known = losses is not None and losses.is_on_host
            self._write(new | self._memory() | self._described(losses if is_known else None))
        else:
            self._unfinished.tell_of(new)
        self._told = sums

    def _record(self) -> None:
        """Write the steps since the last record. If `tick` is writing at this moment, the next step does so."""
        if self._writing.acquire(blocking=False):
            try:
                self._unfinished.flush()
                self._record_sums()
            finally:
                self._writing.release()

    def _record_sums(self) -> None:
        told, new = self._told, _without(self._sums(), self._told)
        if self._device_clock is not None:
            self._await_device(told, new, self._device_clock)
        elif new["n"]:
            new |= self._memory()
            new |= self._described(self._loss)
            self._write(new)
        self._open_window()

    def _await_device(
        self, told: dict[str, Any] | None, new: dict[str, Any], start_clock: Callable[[], DeviceClock]
    ) -> None:
        """Have the records of steps written when the device has finished them: of those that `tick` has written, and of
        those since then."""
        described, timed = self._described(self._loss), self._measured or start_clock()
        self._measured = None
        if hasattr(described.get("loss"), "is_cuda"):
            timed.keep(described.pop("loss"))
        records = [record for record in (told, new) if record is not None and record["n"]]
        records[-1] |= self._memory() | described
        for record in records:
            record |= dict.fromkeys(DEVICE_PHASES)  # the host measured only the queueing
            record["in_backward"] = self._communication.in_backward_on_device(record["n"])
            self._unfinished.add(record, timed, is_newest=record is records[-1], is_told=record is told)

    def _sums(self) -> dict[str, Any]:
        """The sums of the steps since the last record."""
        return {
            "k": "step",
            "t": time.monotonic() - (clock() - self._step_ended),  # of the step, even if it is written later
            "step": self.step,
            "n": self._n,
            "seconds": [self._seconds, self._fastest, self._slowest],
            "samples": self._samples,
            "uncounted": self._uncounted,
            "input": self._input,
            "restarts": self._restarts,
            "forward": self._forward,
            "backward": self._backward,
            "optimizer": self._stepped,
            "communication": self._communicated,
            "in_backward": self._communication.added,
        }

    def _described(self, losses: StepLoss | None) -> dict[str, Any]:
        """The loss of the newest step, and what it is; nothing if it was not kept."""
        described: dict[str, Any] = {"training": self._optimizers.trainings} if self._optimizers.trainings > 1 else {}
        if self._optimizers.mixed:
            return described | {"loss": None, "loss_of": SEVERAL_OPTIMIZERS, "void_after": self._optimizers.start}
        try:
            loss, what = losses.total(self._most, self._optimizers.several) if losses is not None else (None, None)
        except RuntimeError as error:  # tensors on several devices
            self.recorder.drop(error)
            return described
        if what is SEVERAL_OPTIMIZERS:
            described["void_after"] = self._optimizers.start
        if what is not None:
            described |= {"loss": None, "loss_of": what}
        return described if loss is None else described | {"loss": loss}

    def _write(self, record: dict[str, Any]) -> None:
        waited = record.pop("in_backward", None)
        if waited is not None and record.get("backward") is not None:  # the phases exclude each other
            waited = min(waited, record["backward"])
            record["backward"] -= waited
            record["communication"] = (record["communication"] or 0.0) + waited
        if record.get("loss") is not None:
            record["loss"] = float(record["loss"])
        if record.pop("uncounted", 0):
            record["samples"] = None
        if not record.get("restarts"):
            record.pop("restarts", None)
        self.recorder.write(record)


def _without(sums: dict[str, Any], told: dict[str, Any] | None) -> dict[str, Any]:
    """The sums of the steps that have not been written yet."""
    if told is None:
        return sums
    rest = sums | {name: sums[name] - told[name] for name in SUMMED}
    seconds, steps = sums["seconds"][0] - told["seconds"][0], max(1, rest["n"])
    return rest | {"seconds": [seconds, seconds / steps, seconds / steps]}
