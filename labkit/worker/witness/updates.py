"""Writes down whether an optimizer's steps change the weights, and whether those weights are the model's."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from labkit.worker.measures.memory import live_optimizers
from labkit.worker.witness.area import Area, Observed
from labkit.worker.witness.around import call_around
from labkit.worker.witness.models import Stepped, averaged

WATCHED, SAMPLED = 16, 128  # parameters of an optimizer, and elements of each, that are compared
BEGUN = 20  # steps after which a parameter without a gradient may be said to have none
TIES_JUDGED = 20  # steps within which both parts of a tie must have gradients
WINDOWS = 256  # steps whose numbers of backward passes are compared
Reference = Callable[[], Any]  # to a parameter or module, which the script may drop


@dataclass
class Optimized:
    """What is known of an optimizer. `learned`: the places of its parameters that have had a gradient at a check."""

    learned: set[int] = field(default_factory=set)
    before: list[tuple[Reference, Any, Any]] = field(default_factory=list)  # parameters, samples, where a gradient was
    kept: dict[int, Any] = field(default_factory=dict)  # samples of the last check
    orphans: dict[tuple[int, str], tuple[Reference, Any]] = field(default_factory=dict)  # parameters, their samples
    twins: dict[int, int] = field(default_factory=dict)  # steps of the optimizers that have the same parameters


class Updates(Area):
    """Is called before and after each step of an optimizer that no other one wraps."""

    def __init__(self, witness: Observed):
        super().__init__(witness)
        self._known: dict[int, Optimized] = {}

    def before_check(self, optimizer: Any, stepped: Stepped) -> None:
        """Before a step that is checked."""
        known = self._known.setdefault(stepped.number, Optimized())
        with self._torch.no_grad():
            self._sample(known, optimizer)
            self._find_orphans(known, optimizer, stepped.steps + 1)

    def after_check(self, optimizer: Any, stepped: Stepped) -> None:
        """After a step that is checked."""
        if (known := self._known.get(stepped.number)) is not None:
            with self._torch.no_grad():
                self._compare(known, optimizer, stepped.number)

    def _sample(self, known: Optimized, optimizer: Any) -> None:
        """Keep some elements of the largest parameters of low precision, if torch's own optimizer updates these."""
        own = parameters_of(optimizer)
        known.learned |= {place for place, p in enumerate(own) if p.grad is not None}
        low = (self._torch.bfloat16, self._torch.float16)
        is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        several = [p for p in own if is_torchs and p.dtype in low and p.grad is not None and not p.grad.is_sparse]
        known.before = [
            (weakref.ref(p), sample(p).clone(), (gradient := sample(p.grad)).isfinite() & (gradient != 0))
            for p in comparable(sorted(several, key=lambda p: -p.numel()))
        ]

    def _compare(self, known: Optimized, optimizer: Any, number: int) -> None:
        own = parameters_of(optimizer)
        known.learned |= {place for place, p in enumerate(own) if p.grad is not None}  # LBFGS computes it in its step
        if not known.before:
            return
        counts, kept = [], {}
        for reference, before, has_gradient in known.before:
            if (p := reference()) is None:
                continue
            now = kept[id(p)] = sample(p).clone()
            last = known.kept.get(id(p), before)
            counts += [((now != before) & has_gradient).sum(), has_gradient.sum(), ((now != last) & has_gradient).sum()]
        rates = [group["lr"] for group in optimizer.param_groups]
        kinds = str(known.before[0][1].dtype).removeprefix("torch.")
        known.kept, known.before = kept, []
        if counts and all(isinstance(rate, float | int) for rate in rates):
            values = {"optimizer": number, "type": kinds, "lr": max(rates)}
            values |= {"step": self._witness.step, "line": self._witness.line()}
            self._later.read(
                self._torch.stack(counts).view(-1, 3).sum(0),
                lambda sums: self._witness.write("moved", **values, moved=sums[0], sampled=sums[1], since=sums[2]),
            )

    def _find_orphans(self, known: Optimized, optimizer: Any, steps: int) -> None:
        """Write which parameters of a model whose gradients torch averages have one, but are in no optimizer. Somebody
        may update them by hand: only those count that did not change since the last check."""
        last, known.orphans = known.orphans, {}
        own, models = parameters_of(optimizer), list(averaged(self._witness.distributed_models()))
        everything = {id(p) for model in models for p in model.parameters()}
        is_alone = len(self._witness.live_optimizers()) == 1
        places = {id(p) for p in own}
        twins = {
            each.number: each.steps
            for each in self._witness.optimizers
            if (other := each.reference()) is not None and {id(p) for p in parameters_of(other)} == places
        }
        is_twice = sum(made > known.twins.get(number, made) for number, made in twins.items()) > 1
        known.twins = twins
        frozen = set().union(*(known.frozen for known in self._witness.models if known.reference() is not None))
        for number, model in enumerate(models):
            learning = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.grad is not None]
            lost = self._in_no_optimizer(learning, thoroughly=steps >= BEGUN)
            watched = {id(p) for p in comparable(p for _, p in lost)}
            samples = {(number, name): (weakref.ref(p), sample(p).clone()) for name, p in lost if id(p) in watched}
            known.orphans |= samples
            same = [key for key, (p, _) in samples.items() if key in last and last[key][0]() is p()]
            if steps < BEGUN or not same:
                continue
            others = [p for place, p in enumerate(own) if place not in known.learned and id(p) not in everything]
            strange = sum(any(_may_replace(p, other) for _, p in lost) for other in others)
            values = {
                "names": [name for _, name in same[:3]],
                "lost": len(lost),
                "of": len(learning),
                "is_last": lost[-1][0] == learning[-1][0],
                "is_twice": is_twice,
                "unfrozen": sum(id(p) in frozen for _, p in lost),
                "strange": strange,
                "is_idle": is_alone and not known.learned and not getattr(optimizer, "state", True),
                "held": len(own),
                "step": self._witness.step + 1,
                "line": self._witness.line(),
            }
            moved = [(last[key][1] != samples[key][1]).sum() for key in same]
            self._later.read(self._torch.stack(moved), self._write_unless_moved(values))

    def _write_unless_moved(self, values: dict[str, Any]) -> Callable[[list[float]], None]:
        return lambda moved: None if any(moved) else self._witness.write("orphans", **values)

    def _in_no_optimizer(self, named: list[tuple[str, Any]], *, thoroughly: bool) -> list[tuple[str, Any]]:
        """Those that no optimizer has that has made a step, or, which takes some time to find out, none at all."""
        held = {id(p) for optimizer in self._witness.live_optimizers() for p in parameters_of(optimizer)}
        lost = [(name, p) for name, p in named if id(p) not in held]
        if lost and thoroughly:
            held = {id(p) for optimizer in live_optimizers() for p in parameters_of(optimizer)}
            lost = [(name, p) for name, p in lost if id(p) not in held]
        return lost


class Windows(Area):
    """An epoch may end in a window of accumulation that is not complete: what is left then must be stepped or cleared.
    How many backward passes a window has is read in the ring, when it may have happened."""

    def __init__(self, witness: Observed):
        super().__init__(witness)
        self._left, self._usual, self._is_held = 0, 0, False

    def at_epoch(self) -> None:
        self._left, self._is_held = self._witness.passes, False
        if self._left:
            sizes = Counter(self._witness.ring.passes(WINDOWS))
            self._usual, times = sizes.most_common(1)[0] if sizes else (0, 0)
            if self._usual > 1 and times >= max(2, 0.9 * sizes.total()):
                self._witness.follow(self)

    def before_backward(self) -> None:
        """Look at the first pass of an epoch whether the gradients of the passes that were left are still there."""
        if self._is_held or self._witness.passes != self._left or self._witness.is_hidden():
            return

        def held(counts: list[float]) -> None:
            self._is_held = any(counts)

        optimizers = self._witness.live_optimizers()
        gradients = [p.grad for optimizer in optimizers[:1] for p in parameters_of(optimizer) if p.grad is not None]
        gradients = [gradient for gradient in gradients if not gradient.is_sparse]
        if gradients:
            with self._torch.no_grad(), self._witness.unseen():
                counts = [sample(gradient).count_nonzero() for gradient in comparable(gradients)]
                self._later.read(self._torch.stack(counts), held)

    def after_step(self, *_: Any) -> None:
        self._witness.leave(self)
        passes, usual = self._witness.passes, self._usual
        if self._is_held and passes == usual + self._left and len(self._witness.live_optimizers()) == 1:
            self._witness.write("window", passes=passes, usual=usual, left=self._left)


@dataclass
class Parted:
    """Names of a module's parameter that a call has made several of, and how many steps ago."""

    module: Reference
    names: list[str]
    seen: dict[str, Any]
    steps: int = 0


class Ties(Area):
    """Hooks what may part two names of one parameter: `Module._apply` (`to`, `to_empty`) and `load_state_dict`."""

    def __init__(self, witness: Observed):
        super().__init__(witness)
        self._is_inside = False
        self._parted: list[Parted] = []

    def hook(self) -> None:
        module, recorder = self._witness.torch.nn.Module, self._witness.recorder
        for name in ("_apply", "load_state_dict"):
            call_around(module, name, self._observe(name), recorder)

    def _observe(self, by: str) -> Callable[..., Callable[[Any], None] | None]:
        def before(module: Any, *_: Any, **__: Any) -> Callable[[Any], None] | None:
            if self._is_inside:
                return None
            tied = _tied(module)
            self._is_inside = True

            def after(_: Any) -> None:
                self._is_inside = False
                for names in tied:
                    if _are_apart(module, names):
                        seen = {"by": by, "line": self._witness.line()}
                        self._note(Parted(weakref.ref(module), names, seen), module)

            return after

        return before

    def _note(self, tie: Parted, module: Any) -> None:
        """Keep it. A checkpoint whose tensors differ was not tied."""

        def keep(are_equal: list[bool]) -> None:
            if all(are_equal):
                self._parted.append(tie)
                self._witness.follow(self)

        if tie.seen["by"] != "load_state_dict":
            keep([])
            return
        first, *others = [module.get_parameter(name) for name in tie.names]
        if all((p.shape, p.device) == (first.shape, first.device) for p in others) and not self._witness.is_hidden():
            with self._torch.no_grad(), self._witness.unseen():
                self._later.read(self._torch.stack([(sample(p) == sample(first)).all() for p in others]), keep)

    def before_step(self, *_: Any) -> None:
        """Write those that are still apart when both parts have gradients."""
        for tie in list(self._parted):
            tie.steps += 1
            module, names = tie.module(), tie.names
            if module is None or not _are_apart(module, names) or tie.steps > TIES_JUDGED:
                self._parted.remove(tie)
            elif all(module.get_parameter(name).grad is not None for name in names):
                self._parted.remove(tie)
                self._witness.write("parted", names=names, **tie.seen, step=self._witness.step + 1)
        if not self._parted:
            self._witness.leave(self)


def parameters_of(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def sample(tensor: Any) -> Any:
    """Some elements of what this rank has of a tensor."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = local.detach().reshape(-1)
    flat = flat.view(flat.dtype.to_real()) if flat.is_complex() else flat
    return flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED]


def comparable(tensors: Iterable[Any]) -> list[Any]:
    """The first of them that are on one device."""
    tensors = list(tensors)
    return [tensor for tensor in tensors if tensor.device == tensors[0].device][:WATCHED]


def _may_replace(parameter: Any, other: Any) -> bool:
    """Whether the model may have got this parameter instead of the other one, if with another first dimension."""
    one, before = tuple(parameter.shape), tuple(other.shape)
    return bool(other.requires_grad and (one == before or (len(one) == len(before) > 1 and one[1:] == before[1:])))


def _tied(module: Any) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _are_apart(module: Any, names: list[str]) -> bool:
    try:
        return len({id(module.get_parameter(name)) for name in names}) > 1
    except AttributeError:  # it was removed since
        return False
