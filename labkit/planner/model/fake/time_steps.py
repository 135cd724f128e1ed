"""Shortens recurrent layers on this CPU, where torch calls a dozen small operators for each time step: a plan computes
the first and the last steps, and assumes that those in between keep what the step before them kept.

`_layers`, `_gru` and `_rnn` do what aten/src/ATen/native/RNN.cpp does, in the same order, so that memory is exact. Of
the steps in between, only the products are recorded. Runs in the planner's child process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from labkit.planner.model.fake.cuda_kernels import record
from labkit.worker import unpacked

ENDS = 3  # steps computed at each end of a sequence; the first has no gradient of its state, so keeps less

Cell = Callable[..., torch.Tensor]


def skip_steps() -> None:
    """Let torch.nn's GRU and RNN compute few of their time steps, until the process ends. LSTMs have one operator."""
    for name, cell in CELLS.items():
        setattr(torch._VF, name, _skipping(cell, getattr(torch._VF, name)))


def _gru(gates: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    of_input, of_hidden = gates.unsafe_chunk(3, 1), F.linear(hidden, weight, bias).unsafe_chunk(3, 1)
    reset = of_hidden[0].add_(of_input[0]).sigmoid_()
    update = of_hidden[1].add_(of_input[1]).sigmoid_()
    new = of_input[2].add(of_hidden[2].mul_(reset)).tanh_()
    return (hidden - new).mul_(update).add_(new)


def _rnn(
    nonlinearity: Callable[[torch.Tensor], torch.Tensor],
    gates: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return nonlinearity(F.linear(hidden, weight, bias).add_(gates))


CELLS: dict[str, Cell] = {"gru": _gru, "rnn_tanh": partial(_rnn, torch.tanh), "rnn_relu": partial(_rnn, torch.relu)}


def _skipping(cell: Cell, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: torch.Tensor, hidden: torch.Tensor, weights: Any, *more: Any) -> Any:
        if torch.is_tensor(weights) or x.shape[1 if more[-1] else 0] <= 2 * ENDS:  # a packed sequence, or a short one
            return original(x, hidden, weights, *more)
        return _layers(cell, x, hidden, weights, *more)

    return call


def _layers(
    cell: Cell,
    x: torch.Tensor,
    hidden: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    training: bool,
    both: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    size = 4 if biased else 2
    each = [weights[start : start + size] for start in range(0, len(weights), size)]  # for each layer and direction
    x = x.transpose(0, 1) if batch_first else x
    directions = 2 if both else 1
    last: list[torch.Tensor] = []
    for layer in range(layers):
        own = slice(layer * directions, (layer + 1) * directions)
        x, ends = _layer(cell, x, hidden[own], each[own])
        last += ends
        if dropout and training and layer < layers - 1:
            x = F.dropout(x, dropout)
    return x.transpose(0, 1) if batch_first else x, torch.stack(last)


def _layer(
    cell: Cell, x: torch.Tensor, hidden: torch.Tensor, weights: Sequence[Sequence[torch.Tensor]]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output and the last states of one or two directions."""
    steps: list[list[torch.Tensor]] = []
    results: list[torch.Tensor] = []
    for start, (of_input, of_hidden, *biases) in zip(hidden, weights, strict=True):
        bias, bias_of_hidden = biases or (None, None)
        gates = F.linear(x, of_input, bias)  # those of the other direction still exist
        parts = gates.split([1] * ENDS + [len(gates) - 2 * ENDS] + [1] * ENDS)
        order = slice(None, None, -1 if steps else 1)
        steps.append(_steps(partial(cell, weight=of_hidden, bias=bias_of_hidden), parts[order], start, of_hidden))
        results.append(torch.cat(steps[-1][order]))
    return torch.cat(results, -1) if len(results) > 1 else results[0], [outputs[-1][0] for outputs in steps]


def _steps(
    compute: Cell, parts: Sequence[torch.Tensor], hidden: torch.Tensor, weight: torch.Tensor
) -> list[torch.Tensor]:
    """The outputs for parts of the sequence, of which those longer than one step are not computed."""
    saved: list[dict[int, Any]] = []  # references to storages by address, in each step
    outputs: list[torch.Tensor] = []
    for part in parts:
        if len(part) == 1:
            with _noting(saved):
                outputs.append(compute(part[0], hidden).unsqueeze(0))
            hidden = outputs[-1][0]
            continue
        before, latest = saved[-2:]
        returned = {out.untyped_storage()._cdata for out in outputs}
        stored = (storage() for address, storage in latest.items() if address not in {*before, *returned})
        kept = sum(storage.nbytes() for storage in stored if storage is not None)
        product = _Skipped.apply(part, hidden, weight)  # type: ignore[no-untyped-call]
        held = hidden.detach() if returned & latest.keys() else None
        states, hidden = _Keeping.apply(product, hidden.shape, hidden.dtype, len(part) * kept, held)  # type: ignore[no-untyped-call]
        outputs.append(states)
    return outputs


@contextmanager
def _noting(saved: list[dict[int, Any]]) -> Iterator[None]:
    """Append the storages of the tensors saved for backward, and leave them to hooks that are already there."""
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False) or (unpacked, unpacked)
    latest: dict[int, weakref.ref[Any]] = {}
    saved.append(latest)

    def note(tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        latest[storage._cdata] = weakref.ref(storage)
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(note, unpack):
        yield


class _Skipped(torch.autograd.Function):
    """The computation of steps, of which backward comes after what they kept was freed."""

    @staticmethod
    def forward(ctx: Any, gates: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in (gates, hidden)]
        flops, moved = 2 * len(hidden) * weight.numel(), weight.nbytes + hidden.nbytes + gates[0].nbytes
        ctx.work = flops, moved
        record("matmul", flops, moved, len(gates))
        return gates.new_empty(1).expand(gates.shape)  # the size of what the weights' gradients are made of

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        flops, moved = ctx.work
        record("matmul", flops, moved, 2 * len(gradient))
        return (*(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.like), None)


class _Keeping(torch.autograd.Function):
    """The states after steps, and the last one. Keeps `kept` bytes for backward, and if the state before them is given,
    all states."""

    @staticmethod
    def forward(
        ctx: Any, product: torch.Tensor, shape: torch.Size, dtype: torch.dtype, kept: int, before: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = torch.empty((len(product), *shape), dtype=dtype)
        ctx.like = product.shape, product.dtype
        saved = torch.empty(kept, dtype=torch.uint8)[:0]  # not of that size, which a checkpoint would compare
        ctx.save_for_backward(saved, *(() if before is None else (before, states)))
        return states, states[-1]

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        shape, dtype = ctx.like
        return torch.empty(1, dtype=dtype).expand(shape), None, None, None, None
