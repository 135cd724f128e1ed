"""Hooks what torch calls while a script trains: the `__next__` and `_next_index` of a DataLoader's iterator,
`autograd.backward` and `grad`, `GradScaler.scale` and `step`, DDP's `__init__`, and torch's global hooks before and
after `Optimizer.step`.

An error in a hook is counted, never raised: observing must not change the training. A script may have several
optimizers: a GAN's two, one that wraps another, one for each of two trainings. A training's steps are those of the
optimizer that steps most regularly, usually the first one.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from labkit.worker.frames import invisible, leave_out_of_compilation
from labkit.worker.recorder import Recorder
from labkit.worker.witness.around import call_after as call_after


class Observer(Protocol):
    """Is called by the hooks. `stepping` is the time at which the newest step of an optimizer started, `fetching` the
    DataLoader's iterator that the script waits for."""

    recorder: Recorder
    stepping: float
    fetching: Any

    def after_draw(self, iterator: Any, index: Any) -> None: ...
    def after_fetch(self, started: float, iterator: Any, batch: Any) -> None: ...
    def after_last_fetch(self, iterator: Any) -> None: ...
    def after_evaluation_fetch(self, iterator: Any, batch: Any) -> None: ...
    def before_forward(self, model: Any, inputs: Any) -> None: ...
    def before_backward(self, loss: Any, gradient: Any) -> None: ...
    def after_backward(self, whole: bool) -> None: ...
    def before_step(self, optimizer: Any) -> None: ...
    def after_step(self, optimizer: Any) -> None: ...
    def wrapped(self, model: Any) -> None: ...
    def loaded(self, module: Any) -> None: ...


def hook(torch: Any, probe: Observer, before_fetches: Sequence[Callable[[], None]]) -> None:
    """Hook torch, once in a process. `before_fetches` are called before each batch of the training."""
    called: list[Callable[..., None]] = [probe.after_fetch, probe.after_last_fetch, probe.after_evaluation_fetch]
    called += [probe.before_backward, probe.after_backward, probe.before_step, probe.after_step, probe.wrapped]
    called += [probe.loaded, probe.after_draw, probe.before_forward]
    for function in called:
        leave_out_of_compilation(function, with_callees=True)
    _hook_data_loader(torch, probe, before_fetches)
    _hook_autograd(torch, probe)
    _hook_grad_scaler(torch, probe)
    _hook_optimizer(probe)
    call_after(torch.nn.Module, "load_state_dict", probe.loaded, probe.recorder)
    if torch.distributed.is_available():
        call_after(torch.nn.parallel.DistributedDataParallel, "__init__", probe.wrapped, probe.recorder)
        _hook_distributed_model(torch, probe)


def _hook_data_loader(torch: Any, probe: Observer, before_fetches: Sequence[Callable[[], None]]) -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    fetch, is_training, drop = _BaseDataLoaderIter.__next__, torch.is_grad_enabled, probe.recorder.drop
    draw: Callable[[Any], Any] = _BaseDataLoaderIter._next_index
    after_fetch, after_evaluation_fetch = probe.after_fetch, probe.after_evaluation_fetch

    @functools.wraps(draw)
    @invisible
    def _next_index(iterator: Any) -> Any:
        try:
            index = draw(iterator)
        except StopIteration:
            observe_draw(iterator, None)
            raise
        observe_draw(iterator, index)
        return index

    def observe_draw(iterator: Any, index: Any) -> None:
        try:
            probe.after_draw(iterator, index)
        except Exception as error:
            drop(error)

    @functools.wraps(fetch)
    @invisible
    def __next__(iterator: Any) -> Any:
        if not is_training():
            probe.fetching = iterator
            try:
                batch = fetch(iterator)
            finally:
                probe.fetching = None
            try:
                after_evaluation_fetch(iterator, batch)
            except Exception as error:
                drop(error)
            return batch
        for before_fetch in before_fetches:
            try:
                before_fetch()
            except Exception as error:
                drop(error)
        started = time.perf_counter()
        probe.fetching = iterator
        try:
            batch = fetch(iterator)
        except StopIteration:
            probe.after_last_fetch(iterator)
            raise
        finally:
            probe.fetching = None
        try:
            after_fetch(started, iterator, batch)
        except Exception as error:
            drop(error)
        return batch

    _BaseDataLoaderIter._next_index = _next_index  # type: ignore[method-assign]
    _BaseDataLoaderIter.__next__ = __next__  # type: ignore[method-assign, assignment]


def _hook_distributed_model(torch: Any, probe: Observer) -> None:
    kind = torch.nn.parallel.DistributedDataParallel
    prepare = kind._pre_forward  # `forward` itself is left alone: torch.compile knows it

    @functools.wraps(prepare)
    @invisible
    def _pre_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            probe.before_forward(model, (args, kwargs))
        except Exception as error:
            probe.recorder.drop(error)
        return prepare(model, *args, **kwargs)

    kind._pre_forward = _pre_forward


def _hook_autograd(torch: Any, probe: Observer) -> None:
    before_backward, after_backward, drop = probe.before_backward, probe.after_backward, probe.recorder.drop

    def observed(differentiate: Callable[..., Any], *, whole: bool) -> Callable[..., Any]:
        @functools.wraps(differentiate)
        @invisible
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                if whole:
                    gradient = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
                    before_backward(args[0] if args else kwargs["tensors"], gradient)
                else:
                    before_backward(None, None)
            except Exception as error:
                drop(error)
            gradients = differentiate(*args, **kwargs)
            try:
                after_backward(whole)
            except Exception as error:
                drop(error)
            return gradients

        return call

    torch.autograd.backward = observed(torch.autograd.backward, whole=True)  # Tensor.backward calls it
    torch.autograd.grad = observed(torch.autograd.grad, whole=False)


def _hook_grad_scaler(torch: Any, probe: Observer) -> None:
    base, step = torch.amp.GradScaler, torch.amp.GradScaler.step

    def observe_scale(kind: Any) -> None:
        """Observe `scale`, if this class of scalers has one of its own."""
        scale = vars(kind).get("scale")
        if not hasattr(scale, "__code__"):
            return

        @functools.wraps(scale)
        @invisible
        def observed_scale(scaler: Any, outputs: Any) -> Any:
            scaled = scale(scaler, outputs)
            # A disabled scaler returns the loss itself, which must not reference itself.
            if scaled is not outputs and isinstance(scaled, torch.Tensor):
                scaled._labkit_unscaled = outputs
            return scaled

        kind.scale = observed_scale

    @invisible
    def __init_subclass__(kind: Any, /, **kwargs: Any) -> None:
        super(base, kind).__init_subclass__(**kwargs)
        observe_scale(kind)

    @functools.wraps(step)
    @invisible
    def observed_step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        newest = probe.stepping
        result = step(scaler, optimizer, *args, **kwargs)
        try:
            if probe.stepping == newest:  # skipped because of infinite gradients, but still a step of the script
                probe.before_step(optimizer)
                probe.after_step(optimizer)
        except Exception as error:
            probe.recorder.drop(error)
        return result

    for kind in (base, *base.__subclasses__()):
        observe_scale(kind)
    base.__init_subclass__ = classmethod(__init_subclass__)  # FSDP1's ShardedGradScaler is defined later
    base.step = observed_step


def _hook_optimizer(probe: Observer) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    drop = probe.recorder.drop

    def on_step(hook: Callable[[Any], None]) -> Callable[..., None]:
        def call(optimizer: Any, args: Any, kwargs: Any) -> None:
            try:
                hook(optimizer)
            except Exception as error:
                drop(error)

        call._torchdynamo_disable = True  # type: ignore[attr-defined]  # a compiled step() would trace it
        return call

    register_optimizer_step_pre_hook(on_step(probe.before_step))
    register_optimizer_step_post_hook(on_step(probe.after_step))


class Optimizers:
    """`counted` refers weakly to the optimizer whose steps are counted. `several`: others step, too; `mixed`: each has
    a loss of its own. `trainings` counts the optimizers whose steps were counted one after another, and `start` is the
    step after which the current training started."""

    def __init__(self) -> None:
        self.counted: Callable[[], Any] = lambda: None  # a weak reference, as yet to nothing
        self.several = self.mixed = False
        self.trainings = self.start = 0
        self._others: dict[int, tuple[Callable[[], Any], bool]] = {}  # that stepped since, and whether after a backward
        self._earlier: list[Callable[[], Any]] = []  # those whose steps were counted before

    def steps_made(self, optimizer: Any, passes: int, step: int) -> int:
        """How many steps of the training an optimizer's step accounts for, `passes` backward passes after the last.
        `step` is the number of steps before it."""
        if self.counted() is optimizer:
            if self._others:
                self.several = True
                self.mixed |= passes > 0 and any(own for _, own in self._others.values())
                self._others.clear()
            return 1
        stepped, own = self._others.get(id(optimizer), (lambda: None, False))
        if stepped() is optimizer:
            # It steps again without the counted optimizer. Its previous step was not counted: it might have been
            # a GAN's second optimizer, or torch's checkpointing, which steps an optimizer once to create its state.
            self._count(optimizer, step)
            return 2 if own or not passes else 1
        if passes and self.counted() is None:
            self._count(optimizer, step)
            return 1
        self._others[id(optimizer)] = weakref.ref(optimizer), passes > 0
        return 0

    def _count(self, optimizer: Any, step: int) -> None:
        """Count this optimizer's steps from now on."""
        if any(earlier() is optimizer for earlier in self._earlier):  # optimizers that alternate, many steps each
            self.mixed, self.start = True, 0
        else:
            self.several = self.mixed = False
            self.trainings += 1
            self.start = step
        self._earlier = [*(earlier for earlier in self._earlier if earlier()), self.counted]
        self.counted = weakref.ref(optimizer)
        self._others.clear()
