"""What a GPU has one kernel for and a CPU has not, for plans made on the CPU: recurrent layers, where cuDNN has one
call for all steps, attention with dropout, whose scores a GPU never holds, and optimizers, which update all parameters
together. Runs in the planner's child process.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

__all__ = ["KEPT", "follow_kernels", "record"]

# Values kept for backward by step, sample and unit. cuDNN does not publish the size of its reserve space; torch's own
# fused cells keep four gates and the state of an LSTM and five values of a GRU (aten/src/ATen/native/cuda/RNN.cu,
# LSTM_GATE_MULTIPLIER and GRU_WORKSPACE_MULTIPLIER).
KEPT = {"lstm": 5, "gru": 5, "rnn_tanh": 1, "rnn_relu": 1}

_library = torch.library.Library("labkit", "DEF")
_library.define("record(str kind, int flops, int bytes, int calls) -> ()")
_library.impl("record", lambda kind, flops, bytes, calls: None, "CompositeExplicitAutograd")


def record(kind: str, flops: int, bytes: int, calls: int) -> None:
    """Tell the modes that watch operators of `calls` calls, each with these FLOPs and bytes."""
    torch.ops.labkit.record(kind, flops, bytes, calls)


def follow_kernels(assumed: Callable[[str], object]) -> None:
    """Let torch.nn's recurrent layers, attention and torch.optim do as on a GPU, until the process ends. `assumed` is
    called with a sentence."""
    for name in KEPT:
        setattr(torch._VF, name, _as_cudnn(name, getattr(torch._VF, name), assumed))
    attention = F.scaled_dot_product_attention

    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **more: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *rest, **more)  # its kernels drop as they go

    F.scaled_dot_product_attention = attend
    optimizers: Any = import_module("torch.optim.optimizer")
    optimizers._get_foreach_kernels_supported_devices = lambda: ["cpu"]
    optimizers._foreach_supported_types.append(FakeTensor)


def _as_cudnn(name: str, original: Callable[..., Any], assumed: Callable[[str], object]) -> Callable[..., Any]:
    def call(x: torch.Tensor, hidden: Any, weights: Any, *more: Any) -> Any:
        states = [hidden] if torch.is_tensor(hidden) else list(hidden)
        is_packed = torch.is_tensor(weights)  # then the arguments are others
        if is_packed or any(state.shape[-1] != states[0].shape[-1] for state in states) or x.dim() != 3:
            return original(x, hidden, weights, *more)
        _, layers, _, _, both, batch_first = more
        assumed(f"cuDNN is assumed to keep {KEPT[name]} values for each step and unit of a recurrent layer ({name})")
        if torch.is_autocast_enabled("cpu"):
            half = torch.get_autocast_dtype("cpu")
            x, *states = (tensor.to(half) for tensor in (x, *states))
            weights = [weight.to(half) for weight in weights]
        sizes = KEPT[name], layers, 2 if both else 1, batch_first
        return _Layers.apply(sizes, len(states), x, *states, *weights)  # type: ignore[no-untyped-call]

    return call


class _Layers(torch.autograd.Function):
    """All layers and directions: what they return, keep and compute."""

    @staticmethod
    def forward(
        ctx: Any, sizes: tuple[int, int, int, bool], count: int, x: torch.Tensor, *tensors: torch.Tensor
    ) -> Any:
        kept, layers, directions, batch_first = sizes
        states, weights = tensors[:count], tensors[count:]
        steps, samples = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
        width = directions * states[0].shape[-1]
        out = x.new_empty((*x.shape[:2], width))
        between = layers - 1  # outputs that are the next layer's inputs
        reserve = x.new_empty((kept * layers + between) * steps * samples * width)
        ctx.save_for_backward(x, *tensors, out, reserve)
        multiplied = sum(weight.numel() for weight in weights if weight.dim() == 2)
        read = sum(weight.nbytes for weight in weights) + x.nbytes // steps
        flops = 2 * samples * multiplied
        ctx.step = flops, read, steps
        record("recurrent", flops, read, steps)
        return (out, *(torch.empty_like(state) for state in states))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, *tensors, _, _ = ctx.saved_tensors
        flops, read, steps = ctx.step
        record("recurrent", 2 * flops, 2 * read, steps)
        wanted = zip((x, *tensors), ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(torch.empty_like(tensor) if needed else None for tensor, needed in wanted))
