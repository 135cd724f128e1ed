"""Witnesses a rank's training: writes down what it has in common with other ranks, and calls none of them.

Each optimizer step adds some numbers to a ring (labkit.ring), and what torch declares, or what happens rarely, is a
line of `witness.jsonl`, which labkit/witness/evidence.py reads. Everything is keyed by counts that are equal on all
ranks by construction: the n-th DDP model, the n-th step, the n-th loader. The ring also survives a rank that is killed.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from labkit.rank_files import DIGESTS
from labkit.ring import CALLED_IN_JOIN, IN_BACKWARD, JOINED, NO_GRAPH, NOT_SYNCHRONIZED, REDUCED, RingWriter, is_checked
from labkit.worker.recorder import Recorder
from labkit.worker.witness.around import call_after
from labkit.worker.witness.batches import Batches
from labkit.worker.witness.checkpoints import Checkpoints
from labkit.worker.witness.later import Later
from labkit.worker.witness.models import DistributedModel
from labkit.worker.witness.replicas import Replicas
from labkit.worker.witness.schedules import Schedules
from labkit.worker.witness.sharded import Sharded
from labkit.worker.witness.updates import Ties, Updates, Windows


class Witness:
    """One rank's witness. The probe and the hooks call it; `recorder` writes its lines, `ring` its steps."""

    def __init__(self, torch: Any, ring: Path, lines: Path):
        self.torch, self.ring, self.recorder = torch, RingWriter(ring), Recorder(lines)
        self.step = 0  # as the script's own steps are counted
        self.number = 0  # of the newest step of any optimizer
        self.models: list[DistributedModel] = []
        self.fetched = 0  # batches since the newest step, of the iterator in use
        self.passes = 0  # backward passes since then
        self.batches = Batches(self, lines.parent)
        self._iterator: Callable[[], Any] = lambda: None
        self._calls: Callable[[], int] | None = None  # counts the collectives of the group that averages gradients
        self._optimizers: list[Callable[[], Any]] = []
        self._messages: dict[str, int] = {}  # between two ranks, by the names of their groups
        self._before = 0  # collectives that had been called when the newest backward pass began
        self._called: int | None = None  # and when it had ended, where all ranks meet
        self._line = self._flags = self._in_join = 0
        self._loss = math.nan
        self._unseen = torch._C.DisableTorchFunction  # by modes that get torch's functions, as of set_default_device
        self.replicas = Replicas(self, lines.with_name(DIGESTS))
        self.epochs = 0  # iterations over a loader that have begun
        self._has_ended = False  # the iteration in use
        self._checkpoints, self._schedules, later = Checkpoints(self), Schedules(self), Later(torch)
        self._updates, self._windows, self._ties = Updates(self, later), Windows(self, later), Ties(self)
        self._sharded = Sharded(self, later)

    # Called on the step path

    def after_fetch(self, iterator: Any, batch: Any, is_training: bool) -> None:
        if is_training:
            if self._iterator() is not iterator:
                self._iterator, self.fetched = weakref.ref(iterator), 0  # a preview of another loader does not count
                self._has_ended = True
            if self._has_ended:
                self._has_ended = False
                self.epochs += 1
                self._windows.at_epoch()
            self.fetched += 1
        if not self._is_seen():
            with self._unseen():
                self.batches.after_fetch(iterator, batch, is_training)

    def _is_seen(self) -> bool:
        """Whether the script would see what is computed here: a mode of its own gets all of torch's operations."""
        return bool(self.torch._C._len_torch_dispatch_stack())

    def before_forward(self, model: Any, inputs: Any) -> None:
        """Called before a DDP model is, whose gradients may be averaged."""
        if self.torch.is_grad_enabled() and not self._is_seen():
            for number, known in enumerate(self.models):
                if known.reference() is model:
                    with self._unseen():
                        self.batches.before_forward(number, inputs)

    def after_last_fetch(self) -> None:
        self._has_ended = True

    def before_backward(self, loss: Any) -> None:
        loss, is_seen = loss[0] if isinstance(loss, list | tuple) and loss else loss, self._is_seen()
        with self._unseen():
            is_known = loss is not None and loss.numel() == 1 and loss.device.type == "cpu" and not is_seen
            self._loss, self._line = float(loss.detach()) if is_known else math.nan, script_line()
            if not is_seen:
                self._windows.before_backward()
        self._flags = 0 if getattr(loss, "grad_fn", None) is not None else NO_GRAPH
        for model in self.models:
            if (wrapped := model.reference()) is not None:
                self._flags |= NOT_SYNCHRONIZED * (not wrapped.require_backward_grad_sync)
                self._flags |= JOINED * bool(wrapped._join_config.enable)
        self._before = self.calls()
        self._tell(self._before, IN_BACKWARD)

    def after_backward(self) -> None:
        self.passes += 1
        for model in self.models:
            model.after_backward()
        self._called = self.calls()
        self._flags |= REDUCED * (self._called != self._before)
        self._tell(self._called)
        self.batches.after_backward()

    def _tell(self, calls: int, flags: int = 0) -> None:
        flags |= self._flags | self._in_join
        self.ring.at_backward(self.fetched, self.passes, calls, self._line, self._loss, flags)

    def before_step(self, optimizer: Any) -> None:
        """Before a step of an optimizer that no other one wraps."""
        self._ties.before_step()
        if not self._is_seen():
            with self._unseen():
                self._updates.before_step(optimizer)

    def after_step(self, optimizer: Any, step: int) -> None:
        """After a step of an optimizer that no other one wraps; `step` counts those of the training."""
        self.step, self.number = step, self.number + 1
        which = self.number_of(optimizer)
        total, is_seen = 0, self._is_seen()
        if not is_seen:
            with self._unseen():
                total = self.replicas.after_step(optimizer, which)
        calls = self.calls() if self._called is None else self._called
        counted = self.fetched, self.passes, calls, which, self._flags | self._in_join, total
        self.ring.after_step(counted, (step, self._line, self._loss, self._before))
        self._windows.after_step()
        if not is_seen:
            with self._unseen():
                self._updates.after_step(optimizer)
                self._sharded.after_step()
        self._schedules.after_step(optimizer)
        self._checkpoints.after_step()
        if is_checked(self.number):
            self._schedules.write()
        self.fetched = self.passes = self._in_join = 0

    # For those that write it

    def number_of(self, optimizer: Any) -> int:
        """Which of the script's optimizers this is, in the order of their first steps."""
        for number, known in enumerate(self._optimizers):
            if known() is optimizer:
                return number
        self._optimizers.append(weakref.ref(optimizer))
        return len(self._optimizers) - 1

    @property
    def optimizers(self) -> int:
        """How many optimizers have made steps."""
        return len(self._optimizers)

    def line(self) -> int:
        """The line at which the script's own file is now; 0 if it is not running."""
        return script_line()

    def live_optimizers(self) -> list[Any]:
        """Those that have made steps and are still there."""
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    def distributed_models(self) -> list[Any]:
        """Those that DDP has wrapped and that are still there."""
        return [wrapped.module for known in self.models if (wrapped := known.reference()) is not None]

    def finish(self) -> None:
        """Write what is only known at the end. Never raises."""
        try:
            self._checkpoints.after_step()
            self._schedules.write()
        except Exception as error:
            self.recorder.drop(error)

    def calls(self) -> int:
        """How many collectives the group that averages the gradients has called, or else the default group. It is that
        of the first DDP model; which it is must not depend on when models are freed."""
        if self._calls is None:
            self._calls = self._counter()
        return self._calls()

    def _counter(self) -> Callable[[], int]:
        distributed = self.torch.distributed
        if self.models and (first := self.models[0].reference()) is not None:
            return self._counter_of(first.process_group, first.device_type)
        if distributed.is_available() and distributed.is_initialized():
            return self._counter_of(distributed.group.WORLD, None)
        return lambda: 0

    def _counter_of(self, group: Any, device: str | None) -> Callable[[], int]:
        """A function that returns how many collectives a process group has called, DDP's own in C++ among them."""
        try:
            backend = group._get_backend(self.torch.device(device)) if device else group
            count: Callable[[], int] = backend._get_sequence_number_for_group
            count()
            name, counts_messages = group.group_name, backend.name() == "gloo"
        except Exception:  # a backend that does not count
            return lambda: 0
        messages = self._messages
        return (lambda: count() - messages.get(name, 0)) if counts_messages else count

    def hook(self) -> None:
        """Hook what only the witness looks at, once in a process."""
        self._checkpoints.hook()
        self._schedules.hook()
        self._ties.hook()
        if not self.torch.distributed.is_available():
            return
        for name in ("send", "recv", "recv_anysource"):
            call_after(self.torch.distributed.ProcessGroup, name, self.sent, self.recorder)

    def sent(self, group: Any) -> None:
        """Count a message between two ranks, which gloo numbers like its collectives."""
        name = group.group_name
        self._messages[name] = self._messages.get(name, 0) + 1

    def called_in_join(self) -> None:
        """Note that the script called a collective of its own within Join."""
        self._in_join = CALLED_IN_JOIN

    def wrapped(self, model: Any) -> None:
        """Note a model that DDP has wrapped."""
        self.models.append(known := DistributedModel(self.torch, model))
        if len(self.models) == 1:
            self._calls = None
        self.write("ddp", n=len(self.models) - 1, ranks=known.ranks, parameters=len(known.reduced))
        self.replicas.wrapped(len(self.models) - 1)

    def write(self, kind: str, **values: Any) -> None:
        """Write a line: what was seen, at which of the script's lines, after which step."""
        self.recorder.write({"k": kind, "step": self.step, "number": self.number, "line": script_line(), **values})


def script_line() -> int:
    """The line at which the script's own file is now; 0 if it is not running."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == file:
            return frame.f_lineno
        frame = frame.f_back
    return 0
