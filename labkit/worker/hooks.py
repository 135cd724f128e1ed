"""What torch calls while a script trains: DataLoader's `__next__`, `autograd.backward` and `grad`, `GradScaler.scale`
and `step`, and torch's global hooks before and after `Optimizer.step`.

An error in a hook is counted, never raised: observing must not change the training.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from labkit.worker.recorder import Recorder

__all__ = ["Observer", "hook"]


class Observer(Protocol):
    """What the hooks call. `stepping` is the time at which the newest step of an optimizer started."""

    recorder: Recorder
    stepping: float

    def after_fetch(self, started: float, loader: Any, batch: Any) -> None: ...
    def after_evaluation_fetch(self) -> None: ...
    def before_backward(self, loss: Any) -> None: ...
    def after_backward(self, whole: bool) -> None: ...
    def before_step(self, optimizer: Any) -> None: ...
    def after_step(self, optimizer: Any) -> None: ...


def hook(torch: Any, probe: Observer, before_fetches: Sequence[Callable[[], None]]) -> None:
    """Hook torch, once in a process. `before_fetches` are called before each batch of the training."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    fetch, scale, scaled_step = _BaseDataLoaderIter.__next__, torch.amp.GradScaler.scale, torch.amp.GradScaler.step
    after_evaluation_fetch = probe.after_evaluation_fetch
    is_training, drop = torch.is_grad_enabled, probe.recorder.drop
    after_fetch, before_backward, after_backward = probe.after_fetch, probe.before_backward, probe.after_backward
    before_step, after_step = probe.before_step, probe.after_step

    def __next__(loader: Any) -> Any:
        if not is_training():
            batch = fetch(loader)
            try:
                after_evaluation_fetch()
            except Exception as error:
                drop(error)
            return batch
        for before_fetch in before_fetches:
            try:
                before_fetch()
            except Exception as error:
                drop(error)
        started = time.perf_counter()
        batch = fetch(loader)
        try:
            after_fetch(started, loader, batch)
        except Exception as error:
            drop(error)
        return batch

    def observed(differentiate: Callable[..., Any], *, whole: bool) -> Callable[..., Any]:
        @functools.wraps(differentiate)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                before_backward((args[0] if args else kwargs["tensors"]) if whole else None)
            except Exception as error:
                drop(error)
            gradients = differentiate(*args, **kwargs)
            try:
                after_backward(whole)
            except Exception as error:
                drop(error)
            return gradients

        return call

    def scale_(scaler: Any, outputs: Any) -> Any:
        scaled = scale(scaler, outputs)
        # A disabled scaler returns the loss itself, which must not reference itself.
        if scaled is not outputs and isinstance(scaled, torch.Tensor):
            scaled._labkit_unscaled = outputs
        return scaled

    def step_(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        newest = probe.stepping
        done = scaled_step(scaler, optimizer, *args, **kwargs)
        try:
            if probe.stepping == newest:  # skipped because of infinite gradients, but still a step of the script
                before_step(optimizer)
                after_step(optimizer)
        except Exception as error:
            drop(error)
        return done

    def on_step(hook: Callable[[Any], None]) -> Callable[..., None]:
        def call(optimizer: Any, args: Any, kwargs: Any) -> None:
            try:
                hook(optimizer)
            except Exception as error:
                drop(error)

        return call

    _BaseDataLoaderIter.__next__ = functools.wraps(fetch)(__next__)  # type: ignore[method-assign, assignment]
    torch.autograd.backward = observed(torch.autograd.backward, whole=True)  # Tensor.backward calls it
    torch.autograd.grad = observed(torch.autograd.grad, whole=False)
    torch.amp.GradScaler.scale = functools.wraps(scale)(scale_)
    torch.amp.GradScaler.step = functools.wraps(scaled_step)(step_)
    register_optimizer_step_pre_hook(on_step(before_step))
    register_optimizer_step_post_hook(on_step(after_step))
