"""Records what each operator of a model computes and moves, seen by torch's dispatcher on tensors without data.

Runs in the planner's child process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from labkit.planner.model.facts import ByteCount, Work

aten = torch.ops.aten


class Operator(NamedTuple):
    """One call: its kind of kernel, FLOPs, and bytes read and written."""

    kind: str
    phase: str
    flops: int
    bytes: int


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, q_products: int = 1, v_products: int = 1, **__: Any) -> int:
    """Products of scores as wide as a query and as a value; torch 2.10's formula refuses fewer heads of keys."""
    flops: int = 2 * q.shape[:-1].numel() * k.shape[-2] * (q_products * q.shape[-1] + v_products * v.shape[-1])
    return flops


def _recurrent_flops(x: Any, weight: Any, recurrent: Any, *_: Any, **__: Any) -> int:
    """One layer in one direction: both weights on each element of the sequence."""
    flops: int = 2 * x.shape[0] * x.shape[1] * (weight.numel() + recurrent.numel())
    return flops


def _convolution_backward_flops(grad: Any, x: Any, weight: Any, *args: Any, **_: Any) -> int:
    """Twice forward's; torch's own formula ignores the groups of a depthwise convolution."""
    transposed, needed = args[4], args[-1]
    flops: int = sum(needed[:2]) * 2 * (x if transposed else grad).numel() * weight[0].numel()
    return flops


def _attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return _attention_flops(q, k, v, q_products=3, v_products=2)


# Operators that torch's counter does not know, or counts wrong.
FLOPS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    aten._scaled_dot_product_flash_attention: _attention_flops,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward_flops,
    aten._scaled_dot_product_efficient_attention: _attention_flops,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward_flops,
    aten.convolution_backward: _convolution_backward_flops,
    aten.mkldnn_rnn_layer: _recurrent_flops,
    aten.mkldnn_rnn_layer_backward: lambda *args, **_: 2 * _recurrent_flops(*args),
}
KINDS = {"attention": "attention", "conv": "convolution", "rnn": "recurrent"}  # by part of the name
GATHERED = {aten.embedding, aten.index_select, aten.gather, aten.index}  # read only what they return
NOTHING = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view}


def operator_of(func: Any, args: Sequence[Any], kwargs: Any, out: Any, phase: str) -> Operator | None:
    """The operator's work; None for views and allocations, which launch no kernel."""
    packet = getattr(func, "overloadpacket", None)
    if func.namespace == "labkit":
        kind, flops, moved, _ = args
        return Operator(kind, phase, flops, moved)
    if func.namespace != "aten" or packet in NOTHING or _is_view(func):
        return None
    flops = flops_of(packet, args, kwargs or {}, out)
    written = _bytes(out)
    read = written if packet in GATHERED else _bytes((args, [*(kwargs or {}).values()]))
    kind = "memory"
    if flops:
        name = str(packet)
        kind = next((kind for part, kind in KINDS.items() if part in name), "matmul")
        if kind == "convolution" and _is_depthwise(args):
            kind = "depthwise"
    return Operator(kind, phase, flops, read + written)


def flops_of(packet: Any, args: Sequence[Any], kwargs: Any, out: Any) -> int:
    """The FLOPs of one call by torch's formulas; 0 for an operator that only moves data."""
    if packet in FLOPS:
        return FLOPS[packet](*args, **kwargs)
    return int(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0


def work_of(few: Sequence[Operator], more: Sequence[Operator], samples: tuple[int, int]) -> tuple[Work, ...]:
    """The work of a unit whose operators were seen with two numbers of samples."""
    if [each[:2] for each in few] != [each[:2] for each in more]:  # other kernels: all of it grows with the samples
        return _counted((each.kind, each.phase, _through(each.flops, samples[0]), _through(each.bytes, samples[0]))
                        for each in few)  # fmt: skip
    pairs = zip(few, more, strict=True)
    return _counted(
        (a.kind, a.phase, _line(a.flops, b.flops, samples), _line(a.bytes, b.bytes, samples)) for a, b in pairs
    )


def _counted(operators: Iterable[tuple[str, str, ByteCount, ByteCount]]) -> tuple[Work, ...]:
    return tuple(Work(*operator, calls) for operator, calls in Counter(operators).items())


def _line(few: int, more: int, samples: tuple[int, int]) -> ByteCount:
    slope = (more - few) // (samples[1] - samples[0])
    return ByteCount(few - slope * samples[0], slope)


def _through(value: int, samples: int) -> ByteCount:
    return ByteCount(0, value // samples)


@cache
def _is_view(func: Any) -> bool:
    """Whether the results share memory with an argument that is not written."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _is_depthwise(args: Sequence[Any]) -> bool:
    """Whether a convolution is depthwise: then its weight, the last tensor of several axes, has one input channel."""
    tensors = [value for value in args if isinstance(value, torch.Tensor) and value.dim() > 2]
    return bool(tensors) and tensors[-1].shape[1] == 1 and tensors[-1].shape[0] > 1


def _bytes(values: Any) -> int:
    """Bytes of all tensors in it; of an expanded one, those that exist."""
    if isinstance(values, torch.Tensor):
        return min(values.numel() * values.element_size(), values.untyped_storage().nbytes())
    return sum(map(_bytes, values)) if isinstance(values, list | tuple) else 0
