"""See steps, loss, samples, times and memory of any training script on torch, without a line in it.

Five small hooks: DataLoader's `__next__`, `Tensor.backward`, `GradScaler.scale`, and torch's global hooks before and
after `Optimizer.step`. On a step that is not written down they read the clock and add; at most ten times a second
one line goes to the rank's `metrics.jsonl`. A hook that fails is counted, never raised: watching must not change
the training.
"""

from __future__ import annotations

import functools
import json
import math
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Probe"]

clock = time.perf_counter

RECORD_SECONDS = 0.1
UNCONSUMED_BATCHES = 64


class Probe:
    """One rank's recorder. `step` counts optimizer steps of the first optimizer that stepped."""

    def __init__(self, path: Path):
        self.step = 0
        self.dropped = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._memory: Callable[[], dict[str, float]] = resident_set()
        self._optimizer: Any = None  # the outermost optimizer whose step() is running
        self._counted: int | None = None  # id of the optimizer whose steps are counted
        self._batches: deque[int] = deque(maxlen=UNCONSUMED_BATCHES)
        self._loss: Any = None
        self._latest = math.inf  # seconds of the newest step
        self._window()
        self._mark: Callable[[], Any] | None = None  # on CUDA: an event recorded now
        self._sample: list[tuple[str, Any, Any]] | None = None  # phases of this step as pairs of events
        self._began: Any = None  # the event at which the current phase began
        self._waiting: tuple[dict[str, Any], Any, list[tuple[str, Any, Any]]] | None = None
        # marks on the clock within a step
        self._step_started = self._fetched = self._stepping = 0.0

    def _window(self) -> None:
        """Begin to sum up the steps of the next record."""
        self._n = 0
        self._seconds = self._slowest = 0.0
        self._fastest = math.inf
        self._samples = 0
        self._input = self._forward = self._backward = self._stepped = 0.0
        self._due = clock() + RECORD_SECONDS

    def start(self) -> None:
        """Write the header and hook torch. Costs the import of torch, which the script is about to pay anyway."""
        import torch

        rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        self._write(
            {
                "k": "meta",
                "v": 1,
                "time": time.time(),
                "rank": rank,
                "local_rank": local_rank,
                "world_size": int(os.environ["WORLD_SIZE"]),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "device": "cuda" if torch.cuda.is_available() else "cpu",
                "torch": torch.__version__,
            }
        )
        try:
            self._hook(torch)
        except Exception as error:
            self._drop(error)
        self._step_started = clock()

    def finish(self, outcome: str) -> None:
        """Write what is left and how the script ended."""
        if self._n:
            self._record()
        self._flush()
        self._write({"k": "end", "step": self.step, "outcome": outcome, "dropped": self.dropped})

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
        if self._sample is not None and self._mark is not None:
            self._began = self._mark()

    def _before_backward(self) -> None:
        """Only while a step on CUDA is being sampled."""
        if self._sample is not None and self._mark is not None:
            event = self._mark()
            self._sample.append(("forward", self._began, event))
            self._began = event

    def _after_backward(self, started: float, loss: Any) -> None:
        now = clock()
        if self._sample is not None and self._mark is not None:
            event = self._mark()
            self._sample.append(("backward", self._began, event))
            self._began = event
        self._forward += started - (self._fetched or self._step_started)
        self._backward += now - started
        self._fetched = now  # another micro-batch may follow without a DataLoader
        if self._batches:
            self._samples += self._batches.popleft()
        if now + self._latest >= self._due and loss.numel() == 1:  # this step will probably be written down
            self._loss = getattr(loss, "_labkit_unscaled", loss).detach()

    def _before_step(self, optimizer: Any) -> None:
        # A wrapping optimizer (ZeRO, accelerate) steps another inside: the outermost counts.
        if self._optimizer is None or self._optimizer is optimizer:
            self._optimizer = optimizer
            self._stepping = clock()
            if self._sample is not None and self._mark is not None:
                self._began = self._mark()

    def _after_step(self, optimizer: Any) -> None:
        if optimizer is not self._optimizer:
            return
        self._optimizer = None
        now = clock()
        self._stepped += now - self._stepping
        if self._sample is not None and self._mark is not None:
            self._sample.append(("optimizer", self._began, self._mark()))
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
        if self._mark is not None:  # events on every step would cost more than they tell
            self._sample = [] if now + self._latest >= self._due else None
            self._began = self._mark() if self._sample is not None else None
        if self.step == 1:
            self._write({"k": "model"} | held_by(optimizer))

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
        if self._mark is not None:
            self._wait_for_device(record, loss)
        else:
            self._write(record if loss is None else record | {"loss": float(loss)})
        self._window()

    def _wait_for_device(self, record: dict[str, Any], loss: Any) -> None:
        """On CUDA the host runs ahead: reading the loss now would stop it. Copy beside, write with the next record."""
        if loss is not None and loss.is_cuda:
            host = loss.new_empty((), device="cpu", pin_memory=True)
            host.copy_(loss.reshape(()), non_blocking=True)
            loss = host
        # The host's clock tells when kernels were queued, not how long they ran.
        record.update(dict.fromkeys(("forward", "backward", "optimizer")))
        self._waiting = (record, loss, self._sample or [])

    def _flush(self) -> None:
        """Write the record that waited for the device. A tenth of a second later the device is long done."""
        if self._waiting is None:
            return
        (record, loss, phases), self._waiting = self._waiting, None
        for name, began, ended in phases:
            ended.synchronize()
            # One step was timed; the record speaks of n.
            record[name] = (record[name] or 0.0) + began.elapsed_time(ended) / 1e3 * record["n"]
        self._write(record if loss is None else record | {"loss": float(loss)})

    def _write(self, record: dict[str, Any]) -> None:
        """One whole line in one write; a full disk costs records, never the training."""
        try:
            line = json.dumps({"t": time.monotonic(), **_finite(record)}, allow_nan=False) + "\n"
            os.write(self._file, line.encode())
        except (OSError, ValueError, TypeError) as error:
            self._drop(error)

    def _drop(self, error: BaseException) -> None:
        if not self.dropped:
            print(f"labkit: a measurement failed and was left out: {error!r}", file=sys.stderr, flush=True)
        self.dropped += 1

    def _hook(self, torch: Any) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        if torch.cuda.is_available():
            self._memory = lambda: allocator(torch)
            self._mark = lambda: cuda_event(torch)
        fetch, backward, scale = _BaseDataLoaderIter.__next__, torch.Tensor.backward, torch.amp.GradScaler.scale
        is_training = torch.is_grad_enabled
        after_fetch, after_backward = self._after_fetch, self._after_backward
        before_backward, before_step, after_step = self._before_backward, self._before_step, self._after_step
        drop = self._drop

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
            if self._sample is not None:
                before_backward()
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
        register_optimizer_step_pre_hook(on_step(before_step))
        register_optimizer_step_post_hook(on_step(after_step))


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: a loss that is not a number, the event one most wants to read back, goes as text."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def _length(batch: Any) -> int:
    """How many samples a batch holds: the first dimension of the first tensor in it."""
    while isinstance(batch, list | tuple | dict) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape else 0


def resident_set() -> Callable[[], dict[str, float]]:
    """A reader of this process's resident set in bytes, and its peak so far."""
    if not Path("/proc/self/statm").exists():
        import resource

        def largest() -> dict[str, float]:  # macOS tells only the peak, in bytes
            return {"rss": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}

        return largest
    file, page = os.open("/proc/self/statm", os.O_RDONLY), os.sysconf("SC_PAGE_SIZE")
    peak = 0.0

    def read() -> dict[str, float]:
        nonlocal peak
        rss = float(os.pread(file, 100, 0).split()[1]) * page
        peak = max(peak, rss)
        return {"rss": rss, "peak": peak}

    return read


def cuda_event(torch: Any) -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def allocator(torch: Any) -> dict[str, float]:
    """What CUDA's caching allocator holds for this rank, in bytes. One `memory_stats` call: each of torch's
    `memory_*` functions builds the whole dictionary again. The peak is torch's own and is never reset here: the
    script may read it too."""
    if not torch.cuda.is_initialized():
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "allocated": stats.get("allocated_bytes.all.current", 0),
        "peak": stats.get("allocated_bytes.all.peak", 0),
        "reserved": stats.get("reserved_bytes.all.current", 0),
        "retries": stats.get("num_alloc_retries", 0),
    }


def held_by(optimizer: Any) -> dict[str, int]:
    """Bytes this rank holds of parameters, gradients and optimizer state; of a sharded tensor, its own shard."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [v for values in optimizer.state.values() for v in values.values()]
    return {
        "parameters": sum(map(_bytes, parameters)),
        "gradients": sum(_bytes(p.grad) for p in parameters if p.grad is not None),
        "optimizer": sum(map(_bytes, state)),
    }


def _bytes(value: Any) -> int:
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.numel() * local.element_size() if hasattr(local, "element_size") else 0
