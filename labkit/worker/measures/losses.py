"""Derives the loss of a step from the backward passes before the optimizer's step.

Each loss is copied when its pass starts: the script may reduce it over ranks or reuse its tensor afterwards.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

from labkit.worker.measures.weights import MEANS, SHARES, Pass, inspected, is_share, weighting

__all__ = ["NO_SCALAR", "SEVERAL_OPTIMIZERS", "StepLoss"]

NO_SCALAR = "n/a: no backward pass started from a scalar"
SPREAD = "n/a: the loss is a DTensor of which each rank has a part"
SEVERAL_OPTIMIZERS = "n/a: several optimizers, each with its own loss"
SEVERAL_LINES = "n/a: backward passes from several lines, which may be separate losses or parts of one"
SCALAR = ((), (1,))


class StepLoss:
    """The losses of the backward passes since any optimizer's last step. With `alone`, one pass is expected, and its
    graph is not inspected.
    """

    __slots__ = ("_alone", "_evaluations", "_losses", "_passes", "_why")

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._losses: list[Any] = []  # numbers, or copies on a device; before a GradScaler's scaling
        self._passes: list[Pass] = []  # one per loss, unless alone
        self._evaluations = 0  # passes in the closure of the optimizer's step, of which only the first counts
        self._why: str | None = NO_SCALAR  # there is no loss

    def add(self, loss: Any, samples: float | None, in_step: bool, gradient: Any) -> None:
        """Call this before the pass, which frees the graph of the loss. The script's modes do not see it."""
        torch = sys.modules["torch"]
        if torch._C._len_torch_function_stack():
            with torch._C.DisableTorchFunction():
                self._add(loss, samples, in_step, gradient)
        else:
            self._add(loss, samples, in_step, gradient)

    def _add(self, loss: Any, samples: float | None, in_step: bool, gradient: Any) -> None:
        if getattr(loss, "shape", None) not in SCALAR:
            return
        if in_step:
            self._evaluations += 1
            if self._evaluations > 1:
                return
        loss = getattr(loss, "_labkit_unscaled", loss)
        copy, self._why = _copied(loss)
        if copy is None:
            return
        self._losses.append(copy)
        if not self._alone:
            self._passes.append(inspected(loss, samples, gradient))

    @property
    def is_on_host(self) -> bool:
        return all(isinstance(loss, float) for loss in self._losses)

    def total(self, most: int, several_optimizers: bool) -> tuple[Any, str | None]:
        """The loss and its description, None for what backward() was called on. `most`: most passes in any step."""
        losses, passes, n = self._losses, self._passes, len(self._losses)
        if n == 1 and not (most > 1 and passes and is_share(passes[0], most)):
            return losses[0], f"first of {self._evaluations} evaluations" if self._evaluations > 1 else None
        if not n:
            return None, self._why
        if self._alone:
            return None, None  # more than expected, which is known from the next step on
        total = sum(losses)
        for parts in (n, most):
            if all(is_share(one, parts) for one in passes):
                return total * (parts / n), f"mean of {n} micro-batch{'es' if n > 1 else ''}"
        what = weighting(passes)
        if what is SHARES:
            return total, f"sum of {n} {'micro-batches' if len({one.kind for one in passes}) == 1 else 'losses'}"
        if what is not MEANS:
            return None, what
        by_line = defaultdict(list)
        for one, loss in zip(passes, losses, strict=True):
            by_line[one.callers].append(loss)
        if len(by_line) == 1 or all(one.samples is not None for one in passes):
            return total / n, f"mean of {n} backward passes"
        if several_optimizers:
            return None, SEVERAL_OPTIMIZERS
        if len({one.kind for one in passes}) < len(by_line):  # such as all micro-batches but the last under no_sync()
            return None, SEVERAL_LINES
        return sum(sum(like) / len(like) for like in by_line.values()), f"sum of {len(by_line)} losses"


def _copied(loss: Any) -> tuple[Any, str | None]:
    """A loss as a number, or as a copy on its device, for which the host does not wait; None, and why, if there is
    neither."""
    torch = sys.modules["torch"]
    if type(loss) is torch.Tensor and torch._C._len_torch_dispatch_stack():
        with torch._C._DisableTorchDispatch():
            return _copied_here(torch, loss)
    return _copied_here(torch, loss)


def _copied_here(torch: Any, loss: Any) -> tuple[Any, str | None]:
    if hasattr(loss, "placements"):
        if not all(placement.is_replicate() for placement in loss.placements):
            return None, SPREAD
        loss = loss.detach().to_local()
    if loss.is_cpu and type(loss) is torch.Tensor:
        return loss.item(), None
    if loss.is_cuda and torch.cuda.is_current_stream_capturing():
        return None, None
    return loss.detach().to(torch.promote_types(loss.dtype, torch.float32), copy=True), None
