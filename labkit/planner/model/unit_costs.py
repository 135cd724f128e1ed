"""Measures the memory of one unit of a model in forward and backward, on tensors without data.

Backward is also split into input gradients and weight gradients: a zero-bubble pipeline computes the former first and
keeps the intermediate gradients from which it computes the latter (torch/distributed/pipelining/_backward.py of torch
2.13: get_param_groups, stage_backward_input). Runs in the planner's child process.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from labkit.planner.model.facts import ByteCount, Moment, Profile
from labkit.planner.model.fake.checked_fakes import DEVICE
from labkit.planner.model.operators import Operator, operator_of, work_of
from labkit.record import Peak
from labkit.worker import Tracker

Take = Callable[[], torch.Tensor]
# Its first argument is a function that returns its input, so that nothing else holds the input; computation before that
# call belongs to another unit. The remaining arguments are other inputs.
Compute = Callable[..., torch.Tensor]
Beside = tuple[tuple[Any, ...], list[torch.Tensor]]  # and the tensors in it

# Not 1: with one sample, tensors may be contiguous that otherwise are not.
SAMPLES = (2, 3)


class Flow(NamedTuple):
    """A tensor passed between units: its shape without the batch dimension, and its type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Flow:
        """The flow of this tensor, whose first dimension is the batch."""
        return cls(tuple(tensor.shape[1:]), tensor.dtype)

    def make(self, samples: int) -> torch.Tensor:
        """Make such a tensor for `samples` samples."""
        return torch.empty((samples, *self.shape), dtype=self.dtype)

    @property
    def bytes(self) -> int:
        """Bytes per sample."""
        return math.prod(self.shape) * self.dtype.itemsize


class _Source(torch.autograd.Function):
    """Makes a unit's input as the previous unit would; only its users hold it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, flow: Flow, samples: int) -> torch.Tensor:
        return flow.make(samples)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        return None, None, None


class _Sink(torch.autograd.Function):
    """Consumes a unit's output and makes its gradient in backward, as the next unit would; `made` is called with it."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, anchor: torch.Tensor, made: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.flow, ctx.samples, ctx.made = Flow.of(y), len(y), made
        return anchor.view(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:  # nothing up to here is trained
            return None, None, None
        gradient: torch.Tensor = ctx.flow.make(ctx.samples)
        ctx.made(gradient)
        return gradient, None, None


class UnitTracker(Tracker):
    """A tracker that also records when gradients are complete, and the operators."""

    def __init__(self, parameters: Iterable[torch.Tensor]):
        super().__init__()
        self.settled: list[tuple[int, int, int]] = []  # after which event, bytes held so far, bytes of gradients
        self.of_stage: set[int] = set()  # storages that a stage holds if this is its last unit
        self.operators: list[Operator] = []
        self._parameters = list(parameters)
        self.mark(self._parameters, "parameters")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a plan

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):  # half of all calls
            return args[0].fake_device
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if operator := operator_of(func, args, kwargs, out, self.phase):
            self.operators += [operator] * (args[-1] if func.namespace == "labkit" else 1)
        return out

    @property
    def now(self) -> int:
        """Number of events so far."""
        return len(self._events)

    @property
    def held(self) -> int:
        """Bytes held since the start."""
        return sum(size for _, size, _, _ in self._events)

    def restart(self) -> None:
        """Start over, with all present tensors as the baseline."""
        self._events.clear()
        self.operators.clear()
        self._sizes = dict.fromkeys(self._sizes, 0)

    def alive(self, tensor: torch.Tensor) -> Callable[[], bool]:
        """A function that returns whether the tensor's storage still exists."""
        storage = weakref.ref(tensor.untyped_storage())
        return lambda: storage() is not None

    def hold_in_stage(self, tensor: torch.Tensor) -> None:
        """Note that the tensor is the output of the unit or its gradient."""
        self.of_stage |= {self._number_of(storage, before=True) for storage in self._storages_in([tensor])}

    def settle(self, parameter: torch.Tensor) -> None:
        """Hook that is called when this parameter's gradient is complete."""
        gradient = parameter.grad
        assert gradient is not None
        local = getattr(gradient, "_local_tensor", gradient)
        at, bytes_, total = self.settled[-1] if self.settled else (0, 0, 0)
        size = local.numel() * local.element_size()
        self.settled.append((self.now, bytes_ + local.untyped_storage().nbytes(), total + size))

    def levels(self, *, in_stage: bool = False) -> list[tuple[int, int, int]]:
        """After each event: bytes held except complete gradients, bytes kept for backward, bytes of gradients.
        `in_stage`: without what a stage holds."""
        kept = Peak.CATEGORIES.index("activations")
        events = [(n, 0 if in_stage and n in self.of_stage else size) for n, size, _, _ in self._events]
        held = [*accumulate(size for _, size in events)]
        activations = [*accumulate(size * (self._categories[number] == kept) for number, size in events)]
        levels, done = [], [(0, 0, 0), *self.settled]
        for event, (all_of_it, of_it) in enumerate(zip(held, activations, strict=True), 1):
            while len(done) > 1 and done[1][0] < event:
                done.pop(0)
            levels.append((all_of_it - done[0][1], of_it, done[0][2]))
        return levels


class _Run(NamedTuple):
    levels: list[tuple[int, int, int]]
    in_stage: list[tuple[int, int, int]]
    forward: int  # number of events until the unit has its output
    backward: int  # number of events until backward starts
    cached: int
    saved: int
    keeps_input: bool
    keeps_output: bool
    out: Flow
    trained: list[torch.Tensor]
    has_gradient: bool
    operators: list[Operator]


class Computed(NamedTuple):
    """A profile, the unit's output, the parameters whose gradients its backward completes, and whether the output has a
    gradient."""

    profile: Profile
    out: Flow
    trained: list[torch.Tensor]
    has_gradient: bool


def profile(
    compute: Compute,
    parameters: Sequence[torch.Tensor],
    flow: Flow,
    context: Callable[[], AbstractContextManager[Any]],
    *,
    data: bool = False,
    input_kept: bool = False,
    input_trained: bool = True,
    beside: Callable[[int], Beside] = lambda samples: ((), []),
) -> Computed:
    """The memory of `compute` and its backward.

    With `data` the input is data, which is counted elsewhere, as are the other inputs that `beside` makes for a number
    of samples. With `input_kept` the previous unit keeps the input; without `input_trained` the input has no gradient.
    """
    few, more = runs = [
        _run(compute, parameters, flow, context, n, data, input_kept, input_trained, beside(n)) for n in SAMPLES
    ]
    local = [getattr(p, "_local_tensor", p) for p in few.trained]
    profile = Profile(
        parameters=tuple(p.numel() for p in local),
        rows=tuple(p.shape[0] if p.dim() else 1 for p in local),
        input=ByteCount(0, flow.bytes),
        output=ByteCount(0, few.out.bytes),
        forward=_moments([run.levels[: run.forward] for run in runs]),
        saved=_line(few.saved, more.saved),
        keeps_input=few.keeps_input,
        keeps_output=few.keeps_output,
        cached=few.cached,
        backward=_moments([run.levels[run.backward :] for run in runs]) if few.has_gradient else (),
        backward_in_stage=_moments([run.in_stage[run.backward :] for run in runs]) if few.has_gradient else (),
        work=work_of(few.operators, more.operators, SAMPLES),
    )
    return Computed(profile, few.out, few.trained, few.has_gradient)


def _run(
    compute: Compute,
    parameters: Sequence[torch.Tensor],
    flow: Flow,
    context: Callable[[], AbstractContextManager[Any]],
    samples: int,
    data: bool,
    input_kept: bool,
    input_trained: bool,
    beside: Beside,
) -> _Run:
    anchor = torch.zeros((), requires_grad=True)
    held = [flow.make(samples)] if data else []
    ledger = UnitTracker([*parameters, anchor, *held, *beside[1]])
    hooks = [p.register_post_accumulate_grad_hook(ledger.settle) for p in parameters if p.requires_grad]
    input_: Callable[[], bool] = lambda: False  # noqa: E731

    def take() -> torch.Tensor:
        nonlocal input_
        ledger.restart()
        x: torch.Tensor
        if data:
            x = held[0]
        elif input_trained:
            x = _Source.apply(anchor, flow, samples)  # type: ignore[no-untyped-call]
        else:
            x = flow.make(samples)
        input_ = ledger.alive(x)
        if input_kept:
            held.append(x)
        return x

    with ledger:
        with context():
            y = compute(take, *beside[0])
            forward, inside = ledger.now, ledger.held
        cached, out, output = inside - ledger.held, Flow.of(y), ledger.alive(y)
        has_gradient = y.requires_grad
        ledger.hold_in_stage(y)
        end = _Sink.apply(y, anchor, ledger.hold_in_stage) if y.dim() else y  # type: ignore[no-untyped-call]
        del y
        backward, keeps_input, keeps_output = ledger.now, input_(), output()
        saved = ledger.held - (samples * out.bytes if keeps_output else 0)  # the next unit counts its input
        end.backward()
        del end
    for hook in hooks:
        hook.remove()
    trained = [p for p in parameters if p.grad is not None]
    for p in trained:
        p.grad = None
    return _Run(
        ledger.levels(),
        ledger.levels(in_stage=True),
        forward,
        backward,
        cached,
        saved,
        keeps_input,
        keeps_output,
        out,
        trained,
        has_gradient,
        ledger.operators,
    )


def _line(few: int, more: int) -> ByteCount:
    slope = (more - few) // (SAMPLES[1] - SAMPLES[0])
    return ByteCount(few - slope * SAMPLES[0], slope)


def _moments(runs: list[list[tuple[int, int, int]]]) -> tuple[Moment, ...]:
    """The moments with the most memory for some number of samples and some treatment of gradients."""
    few, more = runs
    if len(few) != len(more):  # different kernels, different events: use each maximum
        few, more = ([tuple(map(max, zip(*run, strict=True)))] if run else [] for run in runs)
    moments = [Moment(_line(a[0], b[0]), _line(a[1], b[1]), max(a[2], b[2])) for a, b in zip(few, more, strict=True)]
    largest: list[Moment] = []
    for moment in sorted(set(moments), key=lambda m: m.held.at(SAMPLES[1]) + m.settled, reverse=True):
        if not any(_covers(other, moment) for other in largest):
            largest.append(moment)
    return tuple(sorted(largest, key=moments.index))


def _covers(one: Moment, other: Moment) -> bool:
    """Whether `one` holds at least as much as `other` for every batch and every treatment of complete gradients."""
    least = one.held.at(1) - other.held.at(1)
    return one.held.per_sample >= other.held.per_sample and least >= abs(one.settled - other.settled)
