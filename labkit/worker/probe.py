"""See steps, loss, samples, times and memory of any training script on torch, without a line in it.

Five small hooks: DataLoader's `__next__`, `Tensor.backward`, `GradScaler.scale`, and torch's global hooks before and
after `Optimizer.step`. On a step that is not written down they read the clock and add; at most ten times a second
one line goes to the rank's `metrics.jsonl`. A hook that fails is counted, never raised: watching must not change
the training.
"""

from __future__ import annotations

import functools
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.worker.device_clock import DeviceClock
from labkit.worker.memory import allocator, held_by, resident_set
from labkit.worker.recorder import Recorder

__all__ = ["Probe"]

clock = time.perf_counter

RECORD_SECONDS = 0.1
UNCONSUMED_BATCHES = 64


class Probe:
    """One rank's observer. `step` counts optimizer steps of the first optimizer that stepped."""

    def __init__(self, path: Path):
        self.step = 0
        self.recorder = Recorder(path)
        self._memory: Callable[[], dict[str, float]] = resident_set()
        self._optimizer: Any = None  # the outermost optimizer whose step() is running
        self._counted: int | None = None  # id of the optimizer whose steps are counted
        self._batches: deque[int] = deque(maxlen=UNCONSUMED_BATCHES)
        self._loss: Any = None
        self._latest = math.inf  # seconds of the newest step
        self._step_started = self._fetched = self._stepping = 0.0  # marks on the clock within a step
        self._device_clock: Callable[[], DeviceClock] | None = None  # on CUDA
        self._timed: DeviceClock | None = None  # while a step on CUDA is timed
        self._waiting: tuple[dict[str, Any], Any, DeviceClock | None] | None = None
        self._open_window()

    def _open_window(self) -> None:
        """Begin to sum up the steps of the next record."""
        self._n = self._samples = 0
        self._seconds = self._slowest = 0.0
        self._fastest = math.inf
        self._input = self._forward = self._backward = self._stepped = 0.0
        self._due = clock() + RECORD_SECONDS

    def start(self) -> None:
        """Write the header and hook torch. Costs the import of torch, which the script is about to pay anyway."""
        import torch

        header = {"k": "meta", "v": 1, "time": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
        places = {name: int(os.environ[name.upper()]) for name in ("rank", "local_rank", "world_size")}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.recorder.write(header | places | {"device": device, "torch": torch.__version__})
        if device == "cuda":
            self._memory = lambda: allocator(torch)
            self._device_clock = lambda: DeviceClock(torch)
        try:
            self._hook(torch)
        except Exception as error:
            self.recorder.drop(error)
        self._step_started = clock()

    def finish(self, outcome: str) -> None:
        """Write what is left and how the script ended."""
        if self._n:
            self._record()
        self._flush()
        self.recorder.write({"k": "end", "step": self.step, "outcome": outcome, "dropped": self.recorder.dropped})

    # What the hooks call. Each is on the step path: clock, add, return.

    def _after_fetch(self, started: float, loader: Any, batch: Any) -> None:
        if not self._fetched:  # the step begins with its first batch, not with the evaluation before it
            self._step_started = started
        # Kept on the iterator: an evaluation's batches never mix with the training's.
        batches = loader.__dict__.get("_labkit_batches")
        if batches is None:
            batches = loader.__dict__["_labkit_batches"] = deque(maxlen=UNCONSUMED_BATCHES)
        batches.append(_length(batch))
        self._batches = batches
        self._fetched = now = clock()
        self._input += now - started
        if self._timed is not None:
            self._timed.begin()

    def _after_backward(self, started: float, loss: Any) -> None:
        now = clock()
        self._forward += started - (self._fetched or self._step_started)
        self._backward += now - started
        self._fetched = now  # another micro-batch may follow without a DataLoader
        if self._timed is not None:
            self._timed.end("backward")
        if self._batches:
            self._samples += self._batches.popleft()
        if now + self._latest >= self._due and loss.numel() == 1:  # this step will probably be written down
            self._loss = getattr(loss, "_labkit_unscaled", loss).detach()

    def _before_step(self, optimizer: Any) -> None:
        # A wrapping optimizer (ZeRO, accelerate) steps another inside: the outermost counts.
        if self._optimizer is None or self._optimizer is optimizer:
            self._optimizer = optimizer
            self._stepping = clock()
            if self._timed is not None:
                self._timed.begin()

    def _after_step(self, optimizer: Any) -> None:
        if optimizer is not self._optimizer:
            return
        self._optimizer = None
        now = clock()
        self._stepped += now - self._stepping
        if self._timed is not None:
            self._timed.end("optimizer")
        if self._counted is None:
            self._counted = id(optimizer)
        if self._counted != id(optimizer):  # a second optimizer (a GAN's) is part of the same step
            return
        self._latest = seconds = now - self._step_started
        self.step += 1
        self._n += 1
        self._seconds += seconds
        if seconds < self._fastest:
            self._fastest = seconds
        if seconds > self._slowest:
            self._slowest = seconds
        self._step_started = now
        self._fetched = 0.0
        if now >= self._due:
            self._record()
        if self._device_clock is not None:  # events on every step would cost more than they tell
            self._timed = self._device_clock() if now + self._latest >= self._due else None
        if self.step == 1:
            self.recorder.write({"k": "model"} | held_by(optimizer))

    # Off the step path: at most ten times a second.

    def _record(self) -> None:
        self._flush()
        record = {
            "k": "step",
            "t": time.monotonic(),
            "step": self.step,
            "n": self._n,
            "seconds": [self._seconds, self._fastest, self._slowest],
            "samples": self._samples,
            "input": self._input,
            "forward": self._forward,
            "backward": self._backward,
            "optimizer": self._stepped,
        } | self._memory()
        loss, self._loss = self._loss, None
        if self._device_clock is not None:
            self._wait_for_device(record, loss)
        else:
            self.recorder.write(record if loss is None else record | {"loss": float(loss)})
        self._open_window()

    def _wait_for_device(self, record: dict[str, Any], loss: Any) -> None:
        """On CUDA the host runs ahead: reading the loss now would stop it. Copy beside, write with the next record."""
        if loss is not None and loss.is_cuda:
            host = loss.new_empty((), device="cpu", pin_memory=True)
            host.copy_(loss.reshape(()), non_blocking=True)
            loss = host
        record |= dict.fromkeys(("forward", "backward", "optimizer"))  # those were times of queueing, not of work
        self._waiting = (record, loss, self._timed)

    def _flush(self) -> None:
        """Write the record that waited for the device. A tenth of a second later the device is long done."""
        if self._waiting is None:
            return
        (record, loss, timed), self._waiting = self._waiting, None
        if timed is not None:  # one step was timed; the record speaks of n
            record |= {phase: seconds * record["n"] for phase, seconds in timed.seconds().items()}
        self.recorder.write(record if loss is None else record | {"loss": float(loss)})

    def _hook(self, torch: Any) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        fetch, backward, scale = _BaseDataLoaderIter.__next__, torch.Tensor.backward, torch.amp.GradScaler.scale
        is_training, drop = torch.is_grad_enabled, self.recorder.drop
        after_fetch, after_backward = self._after_fetch, self._after_backward

        def __next__(loader: Any) -> Any:
            if not is_training():
                return fetch(loader)
            started = clock()
            batch = fetch(loader)
            try:
                after_fetch(started, loader, batch)
            except Exception as error:
                drop(error)
            return batch

        def backward_(tensor: Any, *args: Any, **kwargs: Any) -> None:
            if self._timed is not None:
                try:
                    self._timed.end("forward")
                except Exception as error:
                    drop(error)
            started = clock()
            backward(tensor, *args, **kwargs)
            try:
                after_backward(started, tensor)
            except Exception as error:
                drop(error)

        def scale_(scaler: Any, outputs: Any) -> Any:
            scaled = scale(scaler, outputs)
            if isinstance(scaled, torch.Tensor):
                scaled._labkit_unscaled = outputs
            return scaled

        def on_step(hook: Callable[[Any], None]) -> Callable[..., None]:
            def call(optimizer: Any, args: Any, kwargs: Any) -> None:
                try:
                    hook(optimizer)
                except Exception as error:
                    drop(error)

            return call

        _BaseDataLoaderIter.__next__ = functools.wraps(fetch)(__next__)
        torch.Tensor.backward = functools.wraps(backward)(backward_)
        torch.amp.GradScaler.scale = functools.wraps(scale)(scale_)
        register_optimizer_step_pre_hook(on_step(self._before_step))
        register_optimizer_step_post_hook(on_step(self._after_step))


def _length(batch: Any) -> int:
    """How many samples a batch holds: the first dimension of the first tensor in it."""
    while isinstance(batch, list | tuple | dict) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape else 0
