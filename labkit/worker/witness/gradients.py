"""Writes down what becomes of gradients between a backward pass and the step that uses them: whether anything clears
them, too often or never, and whether they are clipped while a GradScaler has multiplied them, or by the norm of a part.

Samples are looked at before and after checked steps only.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.ring import is_checked
from labkit.worker.witness.area import Area, Observed
from labkit.worker.witness.around import call_around
from labkit.worker.witness.models import Stepped
from labkit.worker.witness.updates import comparable, parameters_of, sample

MOST_PASSES = 64  # backward passes between two steps that are looked at
IN_A_ROW = 3  # checks at which nothing has cleared the gradients, or something too often
ROUNDED = 1e-5  # relative, of squares: what clipping may change of a direction
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
Reference = Callable[[], Any]  # to a parameter, which the script may drop


@dataclass
class Kept:
    """What a step has left of an optimizer's gradients, and how many sampled elements since then a backward pass has
    changed (`inside`), and anything else but torch's clipping (`outside`)."""

    parameters: list[Reference]
    last: Any
    nonzero: Any
    outside: Any
    inside: Any
    passes: int = 0


class Clearing(Area):
    """Follows the gradients of torch's own optimizers from a checked step to their next one."""

    def __init__(self, witness: Observed):
        super().__init__(witness)
        self.kept: dict[int, Kept] = {}  # by optimizer
        self._uncleared: dict[int, list[int]] = {}  # steps after checks, in a row, in which nothing had cleared them
        self._before: tuple[list[Reference], Any] | None = None  # parameters and their gradients, before a checked step

    def before_backward(self) -> None:
        self.changed("outside")

    def after_backward(self) -> None:
        self.changed("inside")

    def before_step(self, _: Any, stepped: Stepped) -> None:
        self.changed("outside")
        if (kept := self.kept.pop(stepped.number, None)) is not None:
            self._close(stepped.number, kept)
        if not self.kept:
            self._witness.leave(self)

    def before_check(self, optimizer: Any, _: Any) -> None:
        parameters = _with_gradients(optimizer) if type(optimizer).__module__.startswith("torch.optim.") else []
        self._before = parameters, _gradients(self._witness, parameters)

    def after_check(self, _: Any, stepped: Stepped) -> None:
        (parameters, before), self._before = self._before or ([], None), None
        now = _gradients(self._witness, parameters)
        if before is not None and now is not None:
            nonzero = ((now != 0) & now.isfinite()).sum()
            self.kept[stepped.number] = Kept(parameters, now, nonzero, (now != before).sum(), nonzero * 0)
            self._witness.follow(self)

    def changed(self, by: str) -> None:
        """Count what has changed `inside` a backward pass or `outside`, or, uncounted, by torch's `clipping`."""
        for number, kept in list(self.kept.items()):
            now = _gradients(self._witness, kept.parameters)
            kept.passes += by == "inside"
            if now is None or now.shape != kept.last.shape or kept.passes > MOST_PASSES:
                del self.kept[number]
                self._uncleared[number] = []
                continue
            with self._witness.unseen():
                if by != "clipping":
                    setattr(kept, by, getattr(kept, by) + (now != kept.last).sum())
            kept.last = now

    def _close(self, number: int, kept: Kept) -> None:
        step, line = self._witness.step + 1, self._witness.line()

        def judge(counts: list[float]) -> None:
            nonzero, outside, inside = counts
            earlier = self._uncleared.get(number, [])
            steps = self._uncleared[number] = [*earlier, step] if nonzero and inside and not outside else []
            if len(steps) >= IN_A_ROW:
                self._witness.write("uncleared", step=step, line=line, since=steps[0], checks=len(steps))

        self._later.read(self._torch.stack([kept.nonzero, kept.outside, kept.inside]), judge)


class Discarding(Area):
    """Follows the only optimizer from a checked step to its next one: whether the gradients of passes in `no_sync`,
    which are to be averaged with those of a later pass, are still there when that one begins."""

    def __init__(self, witness: Observed):
        super().__init__(witness)
        self._parameters: list[Reference] = []
        self._weights = self._made = None  # samples of them after the checked step, and of the newest pass's gradients
        self._discarded: list[Any] = []  # by earlier pass, whether they are gone, while the weights are as they were
        self._steps: list[int] = []  # steps after checks, in a row, that have used those of the last pass only

    def after_check(self, optimizer: Any, _: Any) -> None:
        is_alone = len(self._witness.optimizers) == 1 and type(optimizer).__module__.startswith("torch.optim.")
        self._parameters = _with_gradients(optimizer) if is_alone and self._witness.models else []
        self._weights, self._made, self._discarded = self._sample_weights(), None, []
        self._witness.follow(self)

    def before_backward(self) -> None:
        """Look at what is left of the pass before."""
        is_synchronized = any(model.is_synchronized for model in self._witness.models)
        if self._made is None or is_synchronized or (weights := self._sample_weights()) is None:
            return
        are_gone = all(getattr(p(), "grad", None) is None for p in self._parameters)
        left = self._made[:0] if are_gone else _gradients(self._witness, self._parameters)
        if left is not None:
            with self._witness.unseen():
                self._discarded.append(self._made.any() & ~left.any() & (weights == self._weights).all())

    def after_backward(self) -> None:
        self._made = _gradients(self._witness, self._parameters)

    def before_step(self, *_: Any) -> None:
        """See whether the step uses the gradients of the last pass, clipped or not."""
        self._witness.leave(self)
        passes, now, made = self._witness.passes, _gradients(self._witness, self._parameters), self._made
        step, line = self._witness.step + 1, self._witness.line()

        def judge(is_so: list[bool]) -> None:
            steps = self._steps = [*self._steps, step] if is_so[0] else []
            if len(steps) >= IN_A_ROW:
                values = {"passes": passes, "since": steps[0], "checks": len(steps)}
                self._witness.write("discarded", step=step, line=line, **values)

        # Passes on batches of one loader alone: those of another one may be for something else.
        if 1 < passes == self._witness.fetched == len(self._discarded) + 1 and now is not None and made is not None:
            with self._torch.no_grad(), self._witness.unseen():
                made, now = made.double(), now.double()
                is_parallel = (made @ now) ** 2 >= (1 - ROUNDED) * (made @ made) * (now @ now)
                self._later.read(self._torch.stack([*self._discarded, is_parallel]).all().view(1), judge)
        else:
            judge([False])

    def _sample_weights(self) -> Any:
        return _samples(self._witness, [p() for p in self._parameters])


@dataclass
class Clipped:
    """Gradients of an optimizer that torch has clipped, of which that may have changed some (`is_changed`). They had
    been changed in place so often by then (`versions`)."""

    stepped: Stepped
    parameters: list[Reference]
    limit: float | None  # None if only a device knows it
    is_changed: Any
    line: int
    versions: int = 0


class Clipping(Area):
    """Hooks torch's clipping, and `GradScaler.step` and `unscale_`. An optimizer's first step is not looked at."""

    def __init__(self, witness: Observed, clearing: Clearing):
        super().__init__(witness)
        self._clearing = clearing
        self._clipped: list[Clipped] = []  # since the newest step
        self._scaled: Counter[int] = Counter()  # steps of GradScalers, by optimizer
        self._scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ranks: dict[int, list[int]] = {}  # by optimizer

    def hook(self) -> None:
        utils, scaler, recorder = self._torch.nn.utils, self._torch.amp.GradScaler, self._witness.recorder
        # clip_grad_norm_ calls the first one, however the script has imported it.
        for name, public in (("_clip_grads_with_norm_", "clip_grads_with_norm_"), ("clip_grad_value_",) * 2):
            call_around(utils.clip_grad, name, self._clips, recorder)
            setattr(utils, public, getattr(utils.clip_grad, name))
        call_around(scaler, "unscale_", self._unscales, recorder)
        call_around(scaler, "step", self._steps_scaled, recorder)

    def _clips(self, *args: Any, **named: Any) -> Callable[[Any], None] | None:
        due = [known for known in self._witness.optimizers if known.steps + 1 == known.due]
        if not (due and self._witness.passes) and not self._clearing.kept:
            return None
        self._clearing.changed("outside")
        _, limit, norm, *_ = *args, None, None, None
        limit, norm = named.get("max_norm", named.get("clip_value", limit)), named.get("total_norm", norm)
        several = [(known, _with_gradients(known.reference())) for known in due if self._witness.passes]
        before = [(known, parameters, _gradients(self._witness, parameters)) for known, parameters in several]

        def after(_: Any) -> None:
            self._clearing.changed("clipping")
            for known, parameters, gradients in before:
                now = _gradients(self._witness, parameters)
                if gradients is not None and now is not None:
                    with self._torch.no_grad(), self._witness.unseen():
                        is_changed = ((now != gradients) & gradients.isfinite()).any()
                        number = self._number(limit)
                        self._note(Clipped(known, parameters, number, is_changed, self._witness.line()), norm)

        return after

    def _number(self, limit: Any) -> float | None:
        if type(limit) is self._torch.Tensor and limit.is_cpu and limit.numel() == 1:
            limit = limit.item()
        return limit if isinstance(limit, int | float) else None

    def _note(self, one: Clipped, norm: Any) -> None:
        one.versions = _versions(one.parameters)
        if one.limit is not None and not any(_is_unscaled(scaler, one.stepped.reference()) for scaler in self._scalers):
            self._clipped.append(one)
            self._witness.follow(self)
        if type(norm) is self._torch.Tensor and norm.device == one.is_changed.device:
            self._write_norm(one, norm)

    def _write_norm(self, one: Clipped, norm: Any) -> None:
        """Write the norm by which a shard of FSDP1 was clipped."""
        if ranks := self._ranks_of(one.stepped):
            seen: dict[str, Any] = {"optimizer": one.stepped.number, "ranks": ranks, "line": one.line}
            seen |= {"step": self._witness.step + 1, "number": self._witness.number + 1}
            self._later.read(
                self._torch.stack([norm.detach(), one.is_changed.to(norm.dtype)]),
                lambda values: self._witness.write("shard", **seen, norm=values[0], clipped=values[1] > 0),
            )

    def after_step(self, *_: Any) -> None:
        self._witness.leave(self)
        self._clipped = []

    def _unscales(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        """Before a scaler divides an optimizer's gradients by its scale, if it has not done so."""
        own = [one for one in self._clipped if one.stepped.reference() is optimizer]
        self._clipped = [one for one in self._clipped if one.stepped.reference() is not optimizer]
        if scaler not in self._scalers or not scaler.is_enabled() or _is_unscaled(scaler, optimizer):
            return
        for one in own:
            if _versions(one.parameters) == one.versions:  # nothing has changed them since
                self._write_clipped(one, scaler._scale)

    def _write_clipped(self, one: Clipped, scale: Any) -> None:
        seen = {"limit": one.limit, "line": one.line, "step": self._witness.step + 1}
        if scale.device == one.is_changed.device:
            with self._witness.unseen():
                self._later.read(
                    self._torch.stack([scale, one.is_changed.to(scale.dtype)]),
                    lambda values: self._witness.write("clipped", **seen, scale=values[0]) if values[1] else None,
                )

    def _steps_scaled(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> Callable[[Any], None] | None:
        self._unscales(scaler, optimizer)
        self._scalers.add(scaler)
        return (lambda _: self._write_scale(scaler, optimizer)) if scaler.is_enabled() else None

    def _write_scale(self, scaler: Any, optimizer: Any) -> None:
        """After a scaler's step, which it may have left out."""
        known = next((known for known in self._witness.optimizers if known.reference() is optimizer), None)
        if known is None:
            return
        self._scaled[known.number] += 1
        at = self._scaled[known.number]
        if is_checked(at) and not self._witness.is_hidden() and (ranks := self._ranks_of(known)):
            seen: dict[str, Any] = {"optimizer": known.number, "at": at, "ranks": ranks}
            seen |= {"step": self._witness.step, "line": self._witness.line()}
            with self._witness.unseen():
                self._later.read(
                    scaler._scale.view(1), lambda values: self._witness.write("scale", **seen, scale=values[0])
                )

    def _ranks_of(self, stepped: Stepped) -> list[int]:
        """The ranks among which FSDP1 has divided all of an optimizer's parameters; none if it has not."""
        kind = getattr(sys.modules.get(FSDP1), "FullyShardedDataParallel", None)
        optimizer = stepped.reference()
        if kind is not None and optimizer is not None and stepped.number not in self._ranks:
            handles = [each._handle for each in gc.get_objects() if issubclass(type(each), kind)]
            handles = [handle for handle in handles if handle is not None and handle.uses_sharded_strategy]
            owners = {id(p): h for h in handles for p in (h.flat_param, *(h.flat_param._params or ()))}
            found = [owners.get(id(p)) for p in parameters_of(optimizer)]
            groups = {handle.process_group if handle is not None else None for handle in found}
            group = groups.pop() if len(groups) == 1 else None
            ranks_of = self._torch.distributed.get_process_group_ranks
            self._ranks[stepped.number] = list(ranks_of(group)) if group is not None else []
        return self._ranks.get(stepped.number, [])


def _with_gradients(optimizer: Any) -> list[Reference]:
    parameters = parameters_of(optimizer) if optimizer is not None else []
    return [weakref.ref(p) for p in comparable(p for p in parameters if p.grad is not None)]


def _gradients(witness: Observed, parameters: list[Reference]) -> Any:
    """Samples of their gradients, in one tensor; None if one is missing, or if they cannot be looked at now."""
    return _samples(witness, [getattr(p(), "grad", None) for p in parameters])


def _samples(witness: Observed, tensors: list[Any]) -> Any:
    if not tensors or any(t is None or t.is_sparse for t in tensors) or witness.is_hidden():
        return None
    with witness.torch.no_grad(), witness.unseen():
        return witness.torch.cat([sample(tensor) for tensor in tensors])


def _versions(parameters: list[Reference]) -> int:
    """How often their gradients have been changed in place."""
    return sum(gradient._version for p in parameters if (gradient := getattr(p(), "grad", None)) is not None)


def _is_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Whether a GradScaler has already divided this optimizer's gradients."""
    state = scaler._per_optimizer_states.get(id(optimizer)) if scaler.is_enabled() else None
    return state is not None and state["stage"].name != "READY"
