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
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

from labkit.rank_files import DIGESTS
from labkit.ring import (
    CALLED_IN_JOIN,
    IN_BACKWARD,
    NO_GRAPH,
    REDUCED,
    RingWriter,
    next_checked,
)
from labkit.worker.recorder import Recorder
from labkit.worker.witness.around import call_after
from labkit.worker.witness.batches import BATCHES, Batches
from labkit.worker.witness.checkpoints import Checkpoints
from labkit.worker.witness.frozen import Frozen
from labkit.worker.witness.gradients import Clearing, Clipping
from labkit.worker.witness.joined import Joins
from labkit.worker.witness.later import Later
from labkit.worker.witness.models import DistributedModel, Stepped
from labkit.worker.witness.modes import Modes
from labkit.worker.witness.replicas import SCRUB_EVERY, Replicas
from labkit.worker.witness.resumes import Resumes
from labkit.worker.witness.schedules import Schedules
from labkit.worker.witness.seeds import Seeds
from labkit.worker.witness.sharded import Sharded
from labkit.worker.witness.updates import Ties, Updates, Windows


class Witness:
    """One rank's witness. The probe and the hooks call it; `recorder` writes its lines, `ring` its steps."""

    def __init__(self, torch: Any, ring: Path, lines: Path):
        self.torch, self.ring, self.recorder = torch, RingWriter(ring), Recorder(lines)
        self.step = 0  # as the script's own steps are counted
        self.number = 0  # of the newest step of any optimizer
        self.models: list[DistributedModel] = []
        self.optimizers: list[Stepped] = []  # in the order of their first steps
        self.fetched = 0  # batches since the newest step, of the iterator in use
        self.passes = 0  # backward passes since then
        self.epochs = 0  # iterations over a loader that have begun
        self._iterator: Callable[[], Any] = lambda: None
        self._has_ended = False  # the iteration in use
        self._stepped: Stepped | None = None  # the newest optimizer
        self._calls: Callable[[], int] | None = None  # counts the collectives of the group that averages gradients
        self._messages: dict[str, int] = {}  # between two ranks, by the names of their groups
        self._before = 0  # collectives that had been called when the newest backward pass began
        self._called: int | None = None  # and when it had ended, where all ranks meet
        self._file = ""  # the script's, once it runs
        self._line = self._flags = self._in_join = 0
        self._loss = math.nan
        self._differentiated: Any = None  # the loss, during its backward pass
        self._compares_inputs = True  # of the models in the next step
        self._later = later = Later(torch)
        self.batches = Batches(self, lines.parent)
        self.replicas = Replicas(self, later, lines.with_name(DIGESTS))
        self._schedules, self._resumes, self._seeds = Schedules(self), Resumes(self), Seeds(self)
        self._checkpoints = Checkpoints(self, self._resumes)
        self._updates, self._windows, self._ties = Updates(self, later), Windows(self, later), Ties(self)
        self._sharded, self._clearing = Sharded(self, later), Clearing(self, later)
        self._clipping = Clipping(self, later, self._clearing)
        self._frozen, self._modes = Frozen(self, later), Modes(self)

    # Called on the step path, between computations that fill the processor's caches: what is not done there is cheap

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
        self.batches.after_fetch(iterator, batch, is_training)
        if self._seeds.seeded:
            self._seeds.after_fetch(is_training=is_training)

    def is_seen(self) -> bool:
        """Whether the script would see what is computed here: a mode of its own gets all of torch's operations."""
        return bool(self.torch._C._len_torch_dispatch_stack())

    def unseen(self) -> AbstractContextManager[Any]:
        """Within it modes that get torch's functions, as that of set_default_device does, see nothing."""
        return self.torch._C.DisableTorchFunction()  # type: ignore[no-any-return]

    def before_forward(self, model: Any, inputs: Any) -> None:
        """Called before a DDP model is, whose gradients may be averaged."""
        if not self.torch.is_grad_enabled():
            for known in self.models:
                if known.reference() is model:
                    self._modes.before_validation(known, model)
            return
        if self._compares_inputs and not self.is_seen():
            for number, known in enumerate(self.models):
                if known.reference() is model:
                    with self.unseen():
                        self.batches.before_forward(number, inputs)

    def after_last_fetch(self) -> None:
        self._has_ended = True

    def before_backward(self, loss: Any) -> None:
        if self._windows.left and not self.is_seen():
            with self.unseen():
                self._windows.before_backward()
        if self._seeds.seeded:
            self._seeds.before_backward()
        if self._clearing.kept:
            self._clearing.changed("outside")
        flags = 0
        for model in self.models:
            flags |= model.before_backward()
        self._flags, self._line, self._before, self._loss = flags, self.line(), self.calls(), math.nan
        self._differentiated = loss
        flags |= IN_BACKWARD | self._in_join
        self.ring.at_backward(self.fetched, self.passes, self._before, self._line, math.nan, flags)

    def after_backward(self) -> None:
        self.passes += 1
        if self._clearing.kept:
            self._clearing.changed("inside")
        self._called = self.calls()
        loss, self._differentiated = self._differentiated, None
        if self._called != self._before:
            self._flags |= REDUCED
        else:
            self._look_at(loss)
        flags = self._flags | self._in_join
        self.ring.at_backward(self.fetched, self.passes, self._called, self._line, self._loss, flags)
        self.batches.after_backward()

    def _look_at(self, loss: Any) -> None:
        """See whether a loss whose backward pass called no collective had a graph, and if not, its value."""
        loss = loss[0] if type(loss) in (list, tuple) and loss else loss
        with self.unseen():
            if getattr(loss, "is_leaf", False):
                self._flags |= NO_GRAPH
                if loss.is_cpu and loss.numel() == 1 and not self.is_seen():
                    self._loss = float(loss.detach())

    def before_step(self, optimizer: Any) -> None:
        """Before a step of an optimizer that no other one wraps."""
        stepped = self._stepped
        if stepped is None or stepped.reference() is not optimizer:
            stepped = self._stepped = self._find(optimizer)
        stepped.steps += 1
        if self._ties.parted:
            self._ties.before_step()
        if self._resumes.resumed:
            self._resumes.before_step(optimizer)
        if self._clearing.kept:
            self._clearing.before_step(stepped)
        if stepped.steps == stepped.due and not self.is_seen():
            with self.unseen():
                self._updates.before_check(optimizer, stepped)
                self._clearing.before_check(optimizer)
                self._frozen.before_check()

    def after_step(self, optimizer: Any, step: int) -> None:
        """After a step of an optimizer that no other one wraps; `step` counts those of the training."""
        stepped = self._stepped
        if stepped is None:
            return
        self.step, self.number = step, self.number + 1
        is_due, total = stepped.steps == stepped.due, 0
        self._later.poll()
        if is_due:
            self._check(optimizer, stepped)
        for model in stepped.models:
            model.after_step()
            self._modes.after_step(model)
        if not self.number % SCRUB_EVERY and not self.is_seen():
            with self.unseen():
                total = self.replicas.scrub(self.number // SCRUB_EVERY)
        calls = self.calls() if self._called is None else self._called
        counted = self.fetched, self.passes, calls, stepped.number, self._flags | self._in_join, total
        self.ring.after_step(counted, (step, self._line, self._loss, self._before))
        self._windows.after_step()
        if self._clipping.clipped:
            self._clipping.clipped = []
        if self._sharded.samples:
            self._sharded.tell()
        self._schedules.after_step(optimizer)
        if self._seeds.seeded:
            self._seeds.after_step(stepped.number)
        self._checkpoints.after_step()
        if is_due:
            self._schedules.write()
        self.fetched = self.passes = self._in_join = 0
        self._compares_inputs = self.number < BATCHES or stepped.steps + 1 == stepped.due

    def _check(self, optimizer: Any, stepped: Stepped) -> None:
        """Look at what is expensive, after a step that is checked."""
        if not self.is_seen():
            with self.unseen():
                self.replicas.check(optimizer, stepped)
                self._updates.after_check(optimizer, stepped)
                self._clearing.after_check(stepped)
                self._sharded.hook()
        stepped.due = next_checked(stepped.steps)

    # For those that write it

    def _find(self, optimizer: Any) -> Stepped:
        for known in self.optimizers:
            if known.reference() is optimizer:
                return known
        self.optimizers.append(new := Stepped(len(self.optimizers), optimizer))
        return new

    def line(self) -> int:
        """The line at which the script's own file is now; 0 if it is not running."""
        file = self._file = self._file or getattr(sys.modules.get("__main__"), "__file__", "")
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == file:
                return frame.f_lineno
            frame = frame.f_back
        return 0

    def live_optimizers(self) -> list[Any]:
        """Those that have made steps and are still there."""
        return [optimizer for known in self.optimizers if (optimizer := known.reference()) is not None]

    def distributed_models(self) -> list[Any]:
        """Those that DDP has wrapped and that are still there."""
        return [wrapped.module for known in self.models if (wrapped := known.reference()) is not None]

    def finish(self) -> None:
        """Write what is only known at the end. Never raises."""
        try:
            self._later.poll()
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
        self._resumes.hook()
        self._seeds.hook()
        self._modes.hook()
        self._clipping.hook()
        if not self.torch.distributed.is_available():
            return
        Joins(self).hook()
        for name in ("send", "recv", "recv_anysource"):
            call_after(self.torch.distributed.ProcessGroup, name, self.sent, self.recorder)

    def sent(self, group: Any) -> None:
        """Count a message between two ranks, which gloo numbers like its collectives."""
        name = group.group_name
        self._messages[name] = self._messages.get(name, 0) + 1

    def loaded(self, module: Any) -> None:
        """Note that the script has loaded weights into a module."""
        self.replicas.loaded(module)
        self._seeds.loaded()

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
        self.recorder.write({"k": kind, "step": self.step, "number": self.number, "line": self.line(), **values})
