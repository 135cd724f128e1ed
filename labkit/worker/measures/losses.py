"""Derives the loss of a step from the backward passes before the optimizer's step.

Scripts that accumulate gradients may divide each micro-batch's loss; the last operations of its graph show whether they
do. The record says what the loss is: "mean of 4 micro-batches" is the mean before the division.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["NO_SCALAR", "SEVERAL_OPTIMIZERS", "StepLoss", "unpacked"]

NO_SCALAR = "n/a: no backward pass started from a scalar"
SEVERAL_OPTIMIZERS = "n/a: several optimizers, each with its own loss"
SEVERAL_LINES = "n/a: backward passes from several lines, which may be separate losses or parts of one"
ONE_COUNT = "n/a: sums of micro-batches divided by the same number, which may count one micro-batch or all"
HIDDEN = "n/a: saved-tensor hooks hide the divisor of the micro-batch losses"
SCALAR = ((), (1,))
DEEPEST = 6  # operations to inspect: the divisions of accelerate, Trainer and the model, and DDP between them
SUM = 2  # torch's number for reduction="sum"
UNCHANGED = ("_DDPSinkBackward", "ToCopyBackward0")  # each output is the input at the same position


class Pass(NamedTuple):
    """What distinguishes a micro-batch's loss from another loss."""

    samples: int | None  # in the batch from a DataLoader, if no other pass used it
    callers: tuple[int, ...]  # the call stack: equal for passes from the same line
    kind: tuple[str, ...]  # the last operations of the loss, such as cross-entropy's
    factors: list[float]  # numbers by which the last operations multiplied the loss
    is_hidden: bool  # by saved-tensor hooks, which would have to recompute or copy a factor
    divisors: list[Any]  # numbers, as tensors, and tensors without gradient by which they divided it
    summed: int  # how many values were summed before the last divisor divided them; 0 if none were


class StepLoss:
    """The losses of the backward passes since any optimizer's last step. With `alone`, one pass is expected, and its
    graph is not inspected.
    """

    __slots__ = ("_alone", "_evaluations", "_losses", "_passes")

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._losses: list[Any] = []  # detached, before a GradScaler's scaling
        self._passes: list[Pass] = []  # one per loss, unless alone
        self._evaluations = 0  # passes in the closure of the optimizer's step, of which only the first counts

    def add(self, loss: Any, samples: int | None, in_step: bool) -> None:
        """Call this before the pass, which frees the graph of the loss."""
        if getattr(loss, "shape", None) not in SCALAR:
            return
        if in_step:
            self._evaluations += 1
            if self._evaluations > 1:
                return
        loss = getattr(loss, "_labkit_unscaled", loss)
        self._losses.append(loss.detach())
        if not self._alone:
            self._passes.append(Pass(samples, _callers(), _kind(loss), *_factors(loss)))

    def total(self, most: int, several_optimizers: bool) -> tuple[Any, str | None]:
        """The loss and its description, None for what backward() was called on. `most`: most passes in any step."""
        losses, passes, n = self._losses, self._passes, len(self._losses)
        if n == 1:
            return losses[0], f"first of {self._evaluations} evaluations" if self._evaluations > 1 else None
        if not n:
            return None, NO_SCALAR
        if self._alone:
            return None, None  # more than expected, which is known from the next step on
        if any(one.is_hidden for one in passes):
            return None, HIDDEN
        total = sum(losses)
        for parts in (n, most):
            if all(any(abs(factor * parts - 1) < 1e-6 for factor in one.factors) for one in passes):
                return total * (parts / n), f"mean of {n} micro-batches"
        shared = {divisor.data_ptr() for divisor in passes[0].divisors}
        if all(shared & {divisor.data_ptr() for divisor in one.divisors} for one in passes):
            return total, f"sum of {n} micro-batches"  # all divided by the same count
        if all(one.summed for one in passes):
            counts_all = _counts_all(passes)
            if counts_all:
                return total, f"sum of {n} micro-batches"
            if counts_all is None:
                return None, ONE_COUNT
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


_counts_all_on_device: dict[tuple[int, ...], bool | None] = {}  # by line of the script


def _counts_all(passes: list[Pass]) -> bool | None:
    """Whether what divided the sums of micro-batches counts all of them; None if it may count one of them or all.
    Reading it from a GPU waits for the GPU, so that is done once for each line of the script.
    """
    key, on_device = passes[0].callers, passes[0].divisors[-1].device.type != "cpu"
    if on_device and key in _counts_all_on_device:
        return _counts_all_on_device[key]
    with sys.modules["torch"]._C._DisableTorchDispatch():
        counts = {float(one.divisors[-1]) for one in passes}
    answer: bool | None = False
    if len(counts) == 1:
        (count,) = counts
        if any(count > one.summed for one in passes):
            answer = True
        elif any(count not in (one.samples, one.summed) for one in passes):
            answer = None
    if on_device:
        _counts_all_on_device[key] = answer
    return answer


def _callers() -> tuple[int, ...]:
    frame: FrameType | None = sys._getframe(1)
    places: list[int] = []
    while frame is not None:
        places += id(frame.f_code), frame.f_lasti
        frame = frame.f_back
    return tuple(places)


def _kind(loss: Any) -> tuple[str, ...]:
    node = loss.grad_fn
    names: list[str] = []
    while node is not None and len(names) < DEEPEST:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return tuple(names)


def unpacked(tensor: Any) -> Any:
    """For saved-tensor hooks that leave tensors as they are: the only hooks that do not hide a loss's factors."""
    return tensor


def _factors(loss: Any) -> tuple[list[float], bool, list[Any], int]:
    """Numbers by which the last operations multiplied a loss, whether one of them is hidden, numbers and tensors
    without gradient by which they divided it, and how many values were summed before the last of these divided them."""
    factors: list[float] = []
    divisors: list[Any] = []
    torch = sys.modules["torch"]
    (node, place), divided = (loss.grad_fn, 0), False
    for _ in range(DEEPEST):
        name = node.name() if node is not None else ""
        if name in UNCHANGED:
            node, place = node.next_functions[place]
            continue
        if name not in ("DivBackward0", "MulBackward0"):
            break
        source, (other, _) = node.next_functions
        if other is not None:
            break
        if _is_hidden(node, "other"):
            return factors, True, divisors, 0
        operand = node._saved_other
        if type(operand) is not torch.Tensor:
            break
        divided = name == "DivBackward0"
        if divided:
            divisors.append(operand)
        if operand.device.type == "cpu":  # such as Python numbers
            with torch._C._DisableTorchDispatch():  # dispatch modes get a Python number as such, and `item` fails on it
                factors.append((operand.reciprocal() if divided else operand).item())
        node, place = source
    return factors, False, divisors, _summed(node) if divided and node is not None else 0


def _summed(node: Any) -> int:
    """How many values an operation sums up; 0 if it is not a sum."""
    if node.name() == "SumBackward0":
        return int(math.prod(node._saved_self_sym_sizes))
    if getattr(node, "_saved_reduction", None) == SUM and not _is_hidden(node, "target"):
        return int(node._saved_target.numel())
    return 0


def _is_hidden(node: Any, name: str) -> bool:
    return getattr(getattr(node, f"_raw_saved_{name}"), "unpack_hook", None) not in (None, unpacked)
