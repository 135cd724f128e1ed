"""Witnesses a rank's training: writes down what it has in common with other ranks, and calls none of them.

Each optimizer step adds some numbers to a ring (labkit.ring), and what torch declares, or what happens rarely, is a
line of `witness.jsonl`, which labkit/witness/evidence.py reads. Everything is keyed by counts that are equal on all
ranks by construction: the n-th DDP model, the n-th step, the n-th loader. The ring also survives a rank that is killed.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from labkit.rank_files import DIGESTS
from labkit.ring import (
    CALLED_IN_JOIN,
    IN_BACKWARD,
    NO_GRAPH,
    OF_DDP,
    REDUCED,
    RingWriter,
    next_checked,
)
from labkit.worker.recorder import Recorder
from labkit.worker.witness.area import Area
from labkit.worker.witness.around import call_after
from labkit.worker.witness.batches import BATCHES, Batches
from labkit.worker.witness.calls import Calls
from labkit.worker.witness.checkpoints import Checkpoints
from labkit.worker.witness.frozen import Frozen
from labkit.worker.witness.gradients import Clearing, Clipping, Discarding
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

CALLERS = 4  # of labkit's, of which Python would make frame objects, from `line` to what has called torch's backward


class Witness:
    """One rank's witness. The probe and the hooks call it; `recorder` writes its lines, `ring` its steps."""

    def __init__(self, torch: Any, ring: Path, lines: Path):
        self.torch, self.ring, self.recorder = torch, RingWriter(ring), Recorder(lines)
        self.step = 0  # as the script's own steps are counted
        self.number = 0  # of the newest step of any optimizer
        self.models: list[DistributedModel] = []  # all that DDP has wrapped
        self._live: list[DistributedModel] = []  # those that are still there
        self.optimizers: list[Stepped] = []  # that are still there, in the order of their first steps
        self.made = 0  # optimizers so far
        self.fetched = 0  # batches since the newest step, of the iterator in use
        self.passes = 0  # backward passes since then
        self.epochs = 0  # iterations over a loader that have begun
        self._iterator: Callable[[], Any] = lambda: None
        self._stepped: Stepped | None = None  # the newest optimizer
        # How many collectives the group that averages the gradients has called, or else the default group. It is that
        # of the first DDP model; which it is must not depend on when models are freed.
        self.calls: Callable[[], int] = self._first_calls
        self._world: Callable[[], Any] = lambda: None  # the default group
        self._first = 0  # the first DDP model since that was made
        self._messages: dict[str, int] = {}  # between two ranks, by the names of their groups
        self._before = 0  # collectives that had been called when the newest backward pass began
        self._called: int | None = None  # and when it had ended, where all ranks meet
        self._file = ""  # the script's, once it runs
        self._at: tuple[CodeType | None, int, int] = (None, 0, 0)  # where it was last, and in which line
        self._line = self._flags = self._in_join = 0
        self._loss = math.nan
        self._differentiated: Callable[[], Any] = lambda: None  # the loss of the newest backward pass
        self._of_ddp = False  # whether a DDP model was called with gradients since the newest backward pass
        self._compares_inputs = True  # of the models in the next step
        self.later = Later(torch, self.recorder.drop)
        self.batches = Batches(self, lines.parent)
        self.replicas, resumes, clearing = Replicas(self, lines.with_name(DIGESTS)), Resumes(self), Clearing(self)
        others = (Updates, Windows, Ties, Schedules, Seeds, Sharded, Frozen, Modes, Joins, Calls, Discarding)
        self._areas: list[Area] = [self.replicas, resumes, clearing, Checkpoints(self, resumes)]
        self._areas += [Clipping(self, clearing), *(area(self) for area in others)]
        self._following: tuple[Area, ...] = ()

    # Called on the step path, between computations that fill the processor's caches: what is not done there is cheap

    def after_fetch(self, iterator: Any, batch: Any, is_training: bool) -> None:
        if is_training:
            if self._iterator() is not iterator:
                self._iterator, self.fetched = weakref.ref(iterator), 0  # a preview of another loader does not count
            self.fetched += 1
        if self.batches.after_fetch(iterator, batch, is_training) and is_training:
            self.epochs += 1
            self._call(self._areas, "at_epoch")
        if self._following:
            self._call(self._following, "after_fetch", is_training)

    def before_forward(self, model: Any, inputs: Any) -> None:
        """Called before a DDP model is."""
        is_validation = not self.torch.is_grad_enabled()
        self._of_ddp = self._of_ddp or not is_validation
        if not is_validation and not self._compares_inputs:
            return
        number = next((n for n, known in enumerate(self.models) if known.reference() is model), None)
        if number is not None and is_validation:
            self._call(self._areas, "before_validation", self.models[number], model)
        elif number is not None and not self.is_hidden():
            with self.unseen():
                self.batches.before_forward(number, inputs)

    def before_backward(self, loss: Any) -> None:
        if self._following:
            self._call(self._following, "before_backward")
        flags, self._of_ddp = OF_DDP if self._of_ddp else 0, False
        for model in self._live:
            flags |= model.before_backward()
        self._flags, self._line, self._before, self._loss = flags, self.line(CALLERS), self.calls(), math.nan
        loss = loss[0] if type(loss) in (list, tuple) and loss else loss
        self._differentiated = weakref.ref(loss) if isinstance(loss, self.torch.Tensor) else lambda: None
        flags |= IN_BACKWARD | self._in_join
        self.ring.at_backward(self.fetched, self.passes, self._before, self._line, math.nan, flags)

    def after_backward(self) -> None:
        self.passes += 1
        if self._following:
            self._call(self._following, "after_backward")
        self._called = self.calls()
        if self._called != self._before:
            self._flags |= REDUCED
        else:
            self._look_at(self._differentiated())
        flags = self._flags | self._in_join
        self.ring.at_backward(self.fetched, self.passes, self._called, self._line, self._loss, flags)
        self.batches.after_backward()

    def _look_at(self, loss: Any) -> None:
        """See whether a loss whose backward pass called no collective had a graph, and if not, its value."""
        with self.unseen():
            if getattr(loss, "is_leaf", False):
                self._flags |= NO_GRAPH
                if loss.is_cpu and loss.numel() == 1 and not self.is_hidden():
                    self._loss = float(loss.detach())

    def before_step(self, optimizer: Any) -> None:
        """Before a step of an optimizer that no other one wraps. It may raise, and be made again."""
        stepped = self._stepped
        if stepped is None or stepped.reference() is not optimizer:
            stepped = self._stepped = self._find(optimizer)
        if self._following:
            self._call(self._following, "before_step", optimizer, stepped)
        if stepped.steps + 1 >= stepped.due and not self.is_hidden():
            with self.unseen():
                self._call(self._areas, "before_check", optimizer, stepped)

    def after_step(self, optimizer: Any, step: int) -> None:
        """After a step of an optimizer that no other one wraps; `step` counts those of the training."""
        stepped = self._stepped
        if stepped is None:
            return
        stepped.steps += 1
        self.step, self.number = step, self.number + 1
        if self.later.waiting:
            self.later.poll()
        if stepped.steps >= stepped.due:
            self._has_group()
            if not self.is_hidden():
                with self.unseen():
                    self._call(self._areas, "after_check", optimizer, stepped)
            stepped.due = next_checked(stepped.steps)
        for model in stepped.models:
            model.after_step()
        calls = self.calls() if self._called is None else self._called
        counted = (
            self.fetched,
            self.passes,
            calls,
            stepped.number,
            self._flags | self._in_join,
            0 if self.number % SCRUB_EVERY else self._scrub(),
        )
        self.ring.after_step(counted, (step, self._line, self._loss, self._before))
        if self._following:
            self._call(self._following, "after_step", optimizer, stepped)
        self.fetched = self.passes = self._in_join = 0
        self._compares_inputs = self.number < BATCHES or stepped.steps + 1 == stepped.due

    def _call(self, areas: Sequence[Area], moment: str, *arguments: Any) -> None:
        """Call areas at a moment. What one cannot do does not keep others from it."""
        for area in areas:
            try:
                getattr(area, moment)(*arguments)
            except Exception as error:
                self.recorder.drop(error)

    def _scrub(self) -> int:
        if self.is_hidden():
            return 0
        try:
            with self.unseen():
                return self.replicas.scrub(self.number // SCRUB_EVERY)
        except Exception as error:
            self.recorder.drop(error)
            return 0

    # For the areas

    def follow(self, area: Area) -> None:
        """Call this area at every step from now on."""
        if area not in self._following:
            self._following = (*self._following, area)

    def leave(self, area: Area) -> None:
        """Call it at every step no more."""
        self._following = tuple(each for each in self._following if each is not area)

    def is_hidden(self) -> bool:
        """Whether nothing may be computed now: a mode of the script's own would see it, or a CUDA graph repeat it."""
        return bool(self.torch._C._len_torch_dispatch_stack()) or self.later.captures()

    def unseen(self) -> AbstractContextManager[Any]:
        """Within it modes that get torch's functions, as that of set_default_device does, see nothing."""
        return self.torch._C.DisableTorchFunction()  # type: ignore[no-any-return]

    def _find(self, optimizer: Any) -> Stepped:
        for known in self.optimizers:
            if known.reference() is optimizer:
                return known
        new = Stepped(self.made, optimizer)
        self.made += 1
        self.optimizers = [*(known for known in self.optimizers if known.reference() is not None), new]
        return new

    def line(self, callers: int = 1) -> int:
        """The line at which the script's own file is now; 0 if it is not running. So many `callers` are labkit's."""
        file = self._file = self._file or getattr(sys.modules.get("__main__"), "__file__", "")
        frame: FrameType | None = sys._getframe(callers)
        while frame is not None:
            if (code := frame.f_code).co_filename == file:
                known, at, line = self._at
                if (known, at) != (code, frame.f_lasti):  # Python reads the script's table of lines from its beginning
                    line = frame.f_lineno
                    self._at = code, frame.f_lasti, line
                return line
            frame = frame.f_back
        return 0

    @property
    def place(self) -> Mapping[str, Any]:
        """Where the training is in its data: see Batches."""
        return self.batches.place

    def live_optimizers(self) -> list[Any]:
        """Those that have made steps and are still there."""
        return [optimizer for known in self.optimizers if (optimizer := known.reference()) is not None]

    def distributed_models(self) -> list[Any]:
        """Those that DDP has wrapped and that are still there."""
        return [wrapped.module for known in self.models if (wrapped := known.reference()) is not None]

    def finish(self) -> None:
        """Write what is only known at the end. Never raises."""
        self.later.poll()
        self._call(self._areas, "finish")

    def forked(self) -> None:
        """Write nothing more, in a forked child."""
        self.recorder.file.let_go()
        self._call(self._areas, "forked")

    def _first_calls(self) -> int:
        if not self._has_group():
            return 0
        self.calls = self._counter()
        return self.calls()

    def _has_group(self) -> bool:
        """Whether there is a default group; the script may have made another one since."""
        distributed = self.torch.distributed
        world = distributed.group.WORLD if distributed.is_available() and distributed.is_initialized() else None
        if world is not self._world():
            self._world = weakref.ref(world) if world is not None else lambda: None
            self.calls, self._first = self._first_calls, len(self.models)
        return world is not None

    def _counter(self) -> Callable[[], int]:
        first = self.models[self._first].reference() if len(self.models) > self._first else None
        if first is not None:
            return self._counter_of(first.process_group, first.device_type)
        return self._counter_of(self.torch.distributed.group.WORLD, None)

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
        self._call(self._areas, "hook")
        if not self.torch.distributed.is_available():
            return
        for name in ("send", "recv", "recv_anysource"):
            call_after(self.torch.distributed.ProcessGroup, name, self.sent, self.recorder)

    def sent(self, group: Any) -> None:
        """Count a message between two ranks, which gloo numbers like its collectives."""
        name = group.group_name
        self._messages[name] = self._messages.get(name, 0) + 1

    def messages(self, group: Any) -> int:
        """How many messages gloo has numbered among the collectives of a group."""
        return self._messages.get(group.group_name, 0) if self._messages and "gloo" in group.name() else 0

    def loaded(self, module: Any) -> None:
        """Note that the script has loaded weights into a module."""
        self.batches.loads += 1
        self._call(self._areas, "loaded", module)

    def called_in_join(self) -> None:
        """Note that the script called a collective of its own within Join."""
        self._in_join = CALLED_IN_JOIN

    def wrapped(self, model: Any) -> None:
        """Note a model that DDP has wrapped."""
        self._has_group()
        self.models.append(known := DistributedModel(self.torch, model))
        self._live = [*(each for each in self._live if each.reference() is not None), known]
        if len(self.models) == self._first + 1:
            self.calls = self._first_calls
        group, parameters = model.process_group.group_name, len(known.reduced)
        self.write("ddp", n=len(self.models) - 1, ranks=known.ranks, group=group, parameters=parameters)
        self._call(self._areas, "wrapped", len(self.models) - 1)

    def write(self, kind: str, **values: Any) -> None:
        """Write a line: what was seen, at which of the script's lines, after which step."""
        self.recorder.write({"k": kind, "step": self.step, "number": self.number, "line": self.line(), **values})
