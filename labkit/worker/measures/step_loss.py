"""Derives the loss of a step from the backward passes before the optimizer's step, and finds how these are weighted,
from the last operations of their losses.

Scripts that accumulate gradients divide the loss of each micro-batch by their number, weight it with its share of the
step's samples or tokens, or divide sums by the count of all. Passes whose weights sum to 1 add up to the loss of the
step; passes without a weight have the loss of the step as their mean. Each loss is copied when its pass starts: the
script may reduce it over ranks or reuse its tensor afterwards.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from types import FrameType

# What the passes of a step are to each other, if the loss of the step is known, or else why it is not.
SHARES, MEANS = "shares", "means"
ONE_COUNT = "n/a: sums of micro-batches divided by the same number, which may count one micro-batch or all"
WEIGHTED = "n/a: backward passes with weights that do not sum to 1"
HIDDEN = "n/a: saved-tensor hooks hide the divisor of the micro-batch losses"
MOST_OPERATIONS = 16  # to inspect: the divisions of accelerate, Trainer and the model, DDP between them, and addends
KIND_OPERATIONS = 6
MOST_WEIGHTS = 1 << 20  # in a weighted sum; adding them up takes 0.1 ms
MEAN, SUM = 1, 2  # torch's numbers for reduction="mean" and "sum"
MEAN_OPERATIONS = ("MeanBackward0", "MeanBackward1")
EXACT = 1e-6
# Operations on a scalar that do not scale it: each output is the input at the same position, or its negative.
UNCHANGED = (
    *("_DDPSinkBackward", "ToCopyBackward0", "CloneBackward0", "AliasBackward0", "NegBackward0"),
    *("ViewBackward0", "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0"),
)
OF_ONE = ("MeanBackward0", "SumBackward0")  # neither do these, of one value
ADDITIONS = ("AddBackward0", "SubBackward0")
DIVISIONS = ("DivBackward0", "DivBackward1")
OPERATIONS = ("MulBackward0", "MulBackward1", *DIVISIONS)
NO_SCALAR = "n/a: no backward pass started from a scalar"
SPREAD = "n/a: the loss is a DTensor of which each rank has a part"
SEVERAL_OPTIMIZERS = "n/a: several optimizers, each with its own loss"
SEVERAL_LINES = "n/a: backward passes from several lines, which may be separate losses or parts of one"
SCALAR = ((), (1,))


class Term(NamedTuple):
    """An addend of a loss. Numbers that are on a GPU are tensors, or None if they need not be read."""

    factors: Sequence[Any]  # by which the last operations multiplied it, outermost first
    count: Any  # by which the innermost of these divided it, None if none did
    values: Any  # how many values it sums up, or the sum of their weights; 0 if it is not a sum
    has_weights: bool  # whether these values have weights
    is_mean: bool


class Pass(NamedTuple):
    """What distinguishes a micro-batch's loss from another loss."""

    samples: float | None  # in the batch from a DataLoader, if no other pass used it; nan if unknown
    callers: tuple[int, ...]  # the call stack: equal for passes from the same line
    kind: tuple[str, ...]  # the last operations of the loss, such as cross-entropy's
    terms: list[Term]
    outer: int  # how many of their first factors the terms have in common
    divisors: list[Any]  # tensors without gradient by which the last operations divided it
    gradient: Any  # what backward() was given; a number like those of a term
    is_hidden: bool  # by saved-tensor hooks, which would have to recompute or copy a factor


def is_share(one: Pass, parts: int) -> bool:
    """Whether a pass was multiplied by 1 / `parts`, and not by `parts`, too, as accelerate has scripts do."""
    is_plain = not one.is_hidden and not _is_tensor(one.gradient) and one.gradient == 1
    outer = one.terms[0].factors[: one.outer] if is_plain else ()
    factors = [factor for factor in outer if isinstance(factor, int | float)]
    return any(abs(factor * parts - 1) < EXACT for factor in factors) and parts not in factors


_decided: dict[tuple[int, ...], str] = {}  # what `weighting` has read from a GPU, by line of the script


def weighting(passes: list[Pass]) -> str:
    """What the passes of a step are to each other: SHARES, MEANS, or why that is unknown. Reading weights from a GPU
    waits for the GPU, so that is done once for each line of the script."""
    if any(one.is_hidden for one in passes):
        return HIDDEN
    for one in passes:
        if one.callers in _decided:
            return _decided[one.callers]
    pointers = [{divisor.data_ptr() for divisor in one.divisors} for one in passes]
    is_shared = bool(set.intersection(*pointers)) and not all(term.is_mean for one in passes for term in one.terms)
    on_device = any(_is_tensor(number) for one in passes for number in _numbers(one))
    what = SHARES if on_device and is_shared else _compared(passes, is_shared)
    if on_device:
        _decided.update(dict.fromkeys((one.callers for one in passes), what))
    return what


def _compared(passes: list[Pass], is_shared: bool) -> str:
    """As `weighting`, from the terms. `is_shared`: one tensor divided all passes, which are not means."""
    if any(_float(one.gradient) != 1 for one in passes):
        return WEIGHTED
    addends = [[_read(term) for term in terms] for terms in zip(*(one.terms for one in passes), strict=False)]
    relative = [_relative([term.factors for term in terms]) for terms in addends]
    if all(map(_sum_to_one, addends)) or (
        all(_are_close(weights, relative[0]) for weights in relative)
        and any(_sum_to_one(terms, passes[0].outer) for terms in addends)
    ):
        return SHARES
    sums = [terms for terms in addends if all(term.values for term in terms)]
    if any(_are_close([math.prod(term.factors) * term.values - 1 for term in terms]) for terms in sums):
        return MEANS  # each was divided by its own count
    if is_shared:
        return SHARES  # by the count of all
    for terms in addends:  # apart from their own counts
        weights = _relative([[*term.factors, _own(term)] for term in terms])
        if not _are_close(weights, weights[:1] * len(weights)):
            return WEIGHTED
    for terms in sums:
        counts = [term.count for term in terms]
        if None in counts:
            continue
        counts_more = any(term.count > term.values for term in terms)
        if len({*counts}) > 1:
            if counts_more:
                return WEIGHTED
        elif counts_more:
            return SHARES
        elif any(term.count not in (one.samples, term.values) for one, term in zip(passes, terms, strict=True)):
            return ONE_COUNT
    return MEANS


def _own(term: Term) -> float:
    """What a pass may have been weighted with for reasons of its own: its count, which divided it, or its weights."""
    own: float = (term.count or (term.values if term.has_weights else 1)) if term.values else 1
    return own


def _sum_to_one(terms: Sequence[Term], outer: int | None = None) -> bool:
    """Whether the weights of an addend, one of each pass, sum to 1: those that differ between passes, with or without
    the numbers of values, and any of the first `outer` factors that do not differ."""
    rows = [*zip(*(term.factors for term in terms), strict=False)]
    constant = [_are_close([factor / row[0] - 1 for factor in row]) if row[0] else False for row in rows]
    differing = [math.prod(f for f, same in zip_longest(term.factors, constant) if not same) for term in terms]
    products = {1.0}
    for row, same in [*zip(rows, constant, strict=True)][:outer]:
        if same and row[0] != 1:
            products |= {product * row[0] for product in products}
    sums = sum(differing), sum(weight * term.values for weight, term in zip(differing, terms, strict=True))
    return any(abs(total * product - 1) < EXACT for total in sums for product in products)


def _relative(factors: Sequence[Sequence[float]]) -> list[float]:
    """The weight of each pass, as a fraction of all."""
    weights = [math.prod(each) for each in factors]
    total = sum(map(abs, weights)) or 1.0
    return [weight / total for weight in weights]


def _are_close(values: Sequence[float], others: Sequence[float] = ()) -> bool:
    return all(abs(a - b) < EXACT for a, b in zip(values, others or [0.0] * len(values), strict=True))


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
    while node is not None and len(names) < KIND_OPERATIONS:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return tuple(names)


def unpacked(tensor: Any) -> Any:
    """Leave a tensor as it is, in saved-tensor hooks: only hooks with this function do not hide a loss's factors."""
    return tensor


class _HiddenError(Exception):
    """Saved-tensor hooks would have to recompute or copy an operand."""


def inspected(loss: Any, samples: float | None, gradient: Any) -> Pass:
    """A pass that is about to start from this loss, with the gradient that backward() was given, if any."""
    callers = _callers()
    on_device = callers not in _decided
    terms: list[Term] = []
    divisors: list[Any] = []
    outer = None
    waiting: list[tuple[Any, int, tuple[Any, ...], Any]] = [(loss.grad_fn, 0, (), None)]
    with sys.modules["torch"]._C._DisableTorchDispatch():  # dispatch modes fail to read Python numbers
        try:
            for _ in range(MOST_OPERATIONS):
                if not waiting:
                    break
                node, place, factors, count = waiting.pop()
                name = node.name() if node is not None else ""
                if name in UNCHANGED or (name in OF_ONE and math.prod(node._saved_self_sym_sizes) == 1):
                    waiting.append((*node.next_functions[place], factors, count))
                elif name in ADDITIONS:
                    outer = len(factors) if outer is None else outer
                    waiting += [(*source, factors, count) for source in node.next_functions if source[0] is not None]
                elif (found := _operand(node, name)) is not None and _is_number(found[0]):
                    operand, source = found
                    number = _number(operand, on_device)
                    if name in DIVISIONS:
                        count = number
                        number = 1 / number if number is not None else None
                        divisors += [operand] if _is_tensor(operand) else []
                    waiting.append((*source, (*factors, number), count))
                else:
                    values, has_weights = _values(node, name)
                    is_mean = name in MEAN_OPERATIONS or getattr(node, "_saved_reduction", None) == MEAN
                    terms.append(Term(factors, count, _number(values, on_device), has_weights, is_mean))
        except _HiddenError:
            return Pass(samples, callers, (), [], 0, [], None, is_hidden=True)
    terms += [Term(factors, count, 0, has_weights=False, is_mean=False) for _, _, factors, count in waiting]
    outer = len(terms[0].factors) if outer is None else outer
    gradient = 1 if gradient is None else _number(gradient, on_device) if _is_number(gradient) else math.nan
    return Pass(samples, callers, _kind(loss), terms, outer, divisors, gradient, is_hidden=False)


def _operand(node: Any, name: str) -> tuple[Any, Any] | None:
    """What an operation multiplies or divides its input by, if this needs no gradient, and that input."""
    if name not in OPERATIONS:
        return None
    sources = node.next_functions
    if len(sources) == 1:  # a number
        return node._saved_other, sources[0]
    if sources[1][0] is None:
        return _saved(node, "other"), sources[0]
    return (_saved(node, "self"), sources[1]) if sources[0][0] is None and name not in DIVISIONS else None


def _values(node: Any, name: str) -> tuple[Any, bool]:
    """How many values an operation sums up, or the sum of the weights that multiply them; 0 if it is not a sum. And
    whether they have weights."""
    if name == "SumBackward0":
        size = math.prod(node._saved_self_sym_sizes)
        inner = node.next_functions[0][0]
        found = _operand(inner, inner.name()) if inner is not None else None
        if found is None or not _is_tensor(found[0]) or found[0].numel() > MOST_WEIGHTS:
            return size, False
        weights = 1 / found[0] if inner.name() in DIVISIONS else found[0]
        return weights.sum() * (size / weights.numel()), True
    if getattr(node, "_saved_reduction", None) != SUM:
        return 0, False
    if name.startswith("NllLoss"):  # without the labels that it ignores
        return _saved(node, "total_weight"), False
    return (_saved(node, "target").numel() if hasattr(node, "_raw_saved_target") else 0), False


def _number(value: Any, on_device: bool) -> Any:
    """A number; a copy if it is on a GPU, or None if it need not be known."""
    if not _is_tensor(value):
        return value
    if value.device.type == "cpu":
        return value.item()
    return value.detach().clone() if on_device else None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, sys.modules["torch"].Tensor)


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or a tensor of one, but not a DTensor."""
    return isinstance(value, int | float) or (type(value) is sys.modules["torch"].Tensor and value.numel() == 1)


def _numbers(one: Pass) -> Iterator[Any]:
    yield one.gradient
    for term in one.terms:
        yield from (*term.factors, term.count, term.values)


def _read(term: Term) -> Term:
    """The term with numbers instead of tensors."""
    factors, count, values = ([*map(_float, each)] for each in (term.factors, [term.count], [term.values]))
    return Term(factors, count[0], values[0], term.has_weights, term.is_mean)


def _float(value: Any) -> Any:
    return float(value) if _is_tensor(value) else value


def _saved(node: Any, name: str) -> Any:
    if getattr(getattr(node, f"_raw_saved_{name}"), "unpack_hook", None) not in (None, unpacked):
        raise _HiddenError
    return getattr(node, f"_saved_{name}")


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
