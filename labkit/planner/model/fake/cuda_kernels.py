"""Imitates what only a GPU has one kernel for, for plans made on CPU tensors: kernels that torch's operators call on
CUDA only, recurrent layers, where cuDNN has one call for all steps, and optimizers, which update all parameters
together. CUDA's autocast, too: the CPU's own leaves layer norms and softmax in 16 bits and pads in 32, for example.
Runs in the planner's child process.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.amp import autocast_mode
from torch.backends import cuda
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from labkit.planner.model.fake.fakes import replace
from labkit.version import release_of

HALVES = (torch.bfloat16, torch.float16)
LIST = re.compile(r"#define AT_FORALL_(?!DEPRECATED)(\w+)\(_\)(.*)")
ENTRY = re.compile(r'_\((?:ADD_NS\()?(\w+)\)?(?:,\s*"?([\w.]+)"?)?')
BANNED = "binary_cross_entropy"  # under CUDA's autocast only

_cached: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weights in 16 bits
_autocast = torch.library.Library("aten", "IMPL")  # what it registers ends with it
# Values kept for backward by step, sample and unit. cuDNN does not publish the size of its reserve space; torch's own
# fused cells keep four gates and the state of an LSTM and five values of a GRU (aten/src/ATen/native/cuda/RNN.cu,
# LSTM_GATE_MULTIPLIER and GRU_WORKSPACE_MULTIPLIER).
KEPT = {"lstm": 5, "gru": 5, "rnn_tanh": 1, "rnn_relu": 1}
FUSED_RMS_NORM = (2, 9)
NEWER_ATTENTION = (2, 14)  # the release of torch whose memory-efficient attention takes grouped heads
AMPERE = (8, 0)  # the compute capability from which on there is flash attention


def cuda_lists() -> dict[str, list[str]]:
    """The operators ("pow.Tensor_Scalar") on each list of CUDA's autocast, such as "FP32": from the header that torch
    itself is built from, aten/src/ATen/autocast_mode.h."""
    path = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    if not path.exists():
        raise SystemExit(f"plans for GPUs take autocast's rules from torch's headers, which are missing here: {path}")
    header = path.read_text().replace("\\\n", " ")
    return {
        name: [full if "." in full else f"{operator}.{full}".rstrip(".") for operator, full in ENTRY.findall(entries)]
        for name, entries in LIST.findall(header)
    }


def follow_cuda() -> None:
    """Make the CPU's autocast cast as CUDA's, and CUDA's be the CPU's, until the process ends."""
    rules: dict[str, Callable[..., Any]] = {
        "LOWER_PRECISION_FP": _in_half,
        "FP32": _in_32_bits,
        "FP32_SET_OPT_DTYPE": _to_32_bits,
        "DIFFERENT_REDISPATCH_SIGNATURE": _norm_to_32_bits,
        "PROMOTE": _in_widest,
    }
    lists = cuda_lists()
    rule_of = {name: rule for each, rule in rules.items() for name in lists[each]} | {BANNED: _refuse}
    kernels: dict[str, Any] = {}
    for name in torch._C._dispatch_get_all_op_names():
        operator = name.removeprefix("aten::")
        is_cast = torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU")
        if rule := rule_of.get(operator):
            kernels[operator] = partial(_cast, rule, _overload(operator))
        elif name.startswith("aten::") and is_cast:
            kernels[operator] = torch.library.fallthrough_kernel
    with warnings.catch_warnings(action="ignore"):  # that kernels are replaced
        for operator, kernel in kernels.items():
            _autocast.impl(operator, kernel, "AutocastCPU")
    make, clear = torch.autocast.__init__, torch.clear_autocast_cache
    is_enabled, dtype_of, cast_inputs = torch.is_autocast_enabled, torch.get_autocast_dtype, autocast_mode._cast

    def on_cpu(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        make(self, _here(device_type), *args, **kwargs)

    def clear_all() -> None:  # at the end of the outermost autocast
        _cached.clear()
        clear()

    replace(torch.autocast, __init__=on_cpu)
    replace(autocast_mode, _cast=lambda value, device_type, dtype: cast_inputs(value, _here(device_type), dtype))
    replace(
        torch,
        clear_autocast_cache=clear_all,
        is_autocast_enabled=lambda device_type="cuda": is_enabled(_here(device_type)),
        get_autocast_dtype=lambda device_type: dtype_of(_here(device_type)),
        get_autocast_gpu_dtype=lambda: dtype_of("cpu"),
    )


def _here(device_type: str) -> str:
    return "cpu" if device_type == "cuda" else device_type


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _cast(rule: Callable[..., Any], operator: Any, *args: Any, **kwargs: Any) -> Any:
    with _ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU)):
        return rule(operator, args, kwargs)


def _in_half(operator: Any, args: Any, kwargs: Any) -> Any:
    half = torch.get_autocast_dtype("cpu")
    return operator(*_as(half, args), **_as(half, kwargs))


def _in_32_bits(operator: Any, args: Any, kwargs: Any) -> Any:
    return operator(*_as(torch.float32, args), **_as(torch.float32, kwargs))


def _to_32_bits(operator: Any, args: Any, kwargs: Any) -> Any:
    """Compute in 32 bits without copying the argument, unless the caller names a type."""
    named = {argument.name: value for argument, value in zip(operator._schema.arguments, args, strict=False)} | kwargs
    if args[0].dtype in HALVES and named.get("dtype") is None:
        named["dtype"] = torch.float32
    return operator(**named)


def _norm_to_32_bits(operator: Any, args: Any, kwargs: Any) -> Any:
    dtype = torch.float32 if args[0].dtype in HALVES else args[0].dtype
    if operator is torch.ops.aten.norm.Scalar:
        return torch.ops.aten.norm.ScalarOpt_dtype(*args, **kwargs, dtype=dtype)
    keepdim = kwargs.get("keepdim", args[3] if len(args) > 3 else False)
    return torch.ops.aten.norm.ScalarOpt_dim_dtype(*args[:3], keepdim, dtype=dtype)


def _in_widest(operator: Any, args: Any, kwargs: Any) -> Any:
    """Compute in 16 bits unless an argument has 32."""
    is_wide = any(torch.is_tensor(value) and value.dtype is torch.float32 for value in tree_leaves((args, kwargs)))
    return (_in_32_bits if is_wide else _in_half)(operator, args, kwargs)


def _refuse(operator: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy and BCELoss are refused under autocast on a GPU: return logits and use "
        "binary_cross_entropy_with_logits, or compute this loss outside of autocast"
    )


def _as(dtype: torch.dtype, values: Any) -> Any:
    """Cast all but 64-bit numbers, and weights only once for all operators in an autocast, as CUDA's does."""

    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64
        if not is_float or value.dtype is dtype:
            return value
        is_weight = value.dtype is torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
        if not (is_weight and dtype in HALVES and torch.is_autocast_cache_enabled() and torch.is_grad_enabled()):
            return value.to(dtype)
        if value not in _cached:
            _cached[value] = value.to(dtype)
        return _cached[value]

    return tree_map(cast, values)


aten = torch.ops.aten
_library = torch.library.Library("labkit", "DEF")
_library.define("record(str kind, int flops, int bytes, int calls) -> ()")
_library.impl("record", lambda kind, flops, bytes, calls: None, "CompositeExplicitAutograd")
_registered: list[torch.library.Library] = []  # what a library registers ends with it


def record(kind: str, flops: int, bytes: int, calls: int) -> None:
    """Tell the modes that watch operators of `calls` calls, each with these FLOPs and bytes."""
    torch.ops.labkit.record(kind, flops, bytes, calls)


def follow_kernels(capability: tuple[int, int], assumed: Callable[[str], object]) -> None:
    """Let torch's operators, recurrent layers and optimizers do as on a GPU of this compute capability, until the
    process ends; real tensors, which a model's constructor may compute with, are computed on the CPU. `assumed` is
    called with a sentence."""
    library = torch.library.Library("aten", "IMPL")
    _registered.append(library)
    kernels: dict[str, Callable[..., Any]] = {
        "dropout": _dropout,
        "lstm_cell": _lstm_cell,
        "scaled_dot_product_attention": _Attention(capability),
    }
    if release_of(torch.__version__) >= FUSED_RMS_NORM:
        kernels["rms_norm"] = _rms_norm
        # A kernel for the CPU, which fake tensors never call, lets autograd see one operator instead of its parts.
        library.impl("_fused_rms_norm", lambda *args: (_rms_norm(*args), args[0].new_empty(0)), "CPU")
    with warnings.catch_warnings(action="ignore"):  # that kernels are replaced
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CompositeImplicitAutograd")
    replace(torch._VF, **{name: _as_cudnn(name, getattr(torch._VF, name), assumed) for name in KEPT})
    optimizers: Any = import_module("torch.optim.optimizer")
    replace(optimizers, _get_foreach_kernels_supported_devices=lambda: ["cpu"])
    optimizers._foreach_supported_types.append(FakeTensor)


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Keep one byte for each element; aten/src/ATen/native/Dropout.cpp."""
    if not train or not p or not x.numel():
        return x
    return aten.native_dropout(x, p, train)[0] if p < 1 else x * x.new_zeros(())


def _rms_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: float | None = None) -> Any:
    """aten/src/ATen/native/layer_norm.cpp"""
    if is_fake(x) and (weight is None or weight.dtype == x.dtype):
        return aten._fused_rms_norm(x, shape, weight, eps)[0]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    out = wide * wide.pow(2).mean([*range(-len(shape), 0)], keepdim=True).add_(eps).rsqrt()
    return (out if weight is None else out * weight).type_as(x)


def _lstm_cell(
    x: torch.Tensor,
    states: list[torch.Tensor],
    weight: torch.Tensor,
    recurrent: torch.Tensor,
    bias: torch.Tensor | None = None,
    recurrent_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """aten/src/ATen/native/RNN.cpp"""
    hidden, cell = states
    gates, recurrent_gates = x @ weight.t(), hidden @ recurrent.t()
    if is_fake(x):
        hidden, cell, _ = aten._thnn_fused_lstm_cell(gates, recurrent_gates, cell, bias, recurrent_bias)
        return hidden, cell
    biases = 0.0 if bias is None or recurrent_bias is None else bias + recurrent_bias
    into, forget, new, out = (gates + recurrent_gates + biases).chunk(4, 1)
    cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


class _Attention:
    """Chooses among the kernels of scaled_dot_product_attention as aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
    does, and prepares their arguments as attention.cpp beside it. cuDNN's kernel keeps what flash attention keeps."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._is_ampere = capability >= AMPERE

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        _validate(query, key, value, attn_mask, is_causal)
        if query.dim() == key.dim() == value.dim() == 3 and not _is_older():
            query, key, value = (x[None] for x in (query, key, value))
            mask = attn_mask[None] if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
            return self(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
        has_rows = attn_mask is None or attn_mask.stride(-1) == 1
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
        tensors, width = (query, key, value), value.shape[-1]
        is_fused = is_fake(query) and has_rows and _are_fusible(query, key, value, enable_gqa)
        is_cross = is_causal and query.shape[-2] != key.shape[-2]
        if is_fused and attn_mask is None and not is_cross and self._can_flash(query, value):
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            padded = [F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in tensors]
            out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)
            return out[0][..., :width]
        is_grouped = query.shape[1] != key.shape[1]
        if is_fused and self._can_save_memory(query, key, value, is_grouped):
            is_trained = any(x.requires_grad for x in tensors)
            keeps = is_trained or (attn_mask is not None and attn_mask.requires_grad and not _is_older())
            bias = None if attn_mask is None else _expanded(attn_mask, query, key)
            memory_efficient = aten._scaled_dot_product_efficient_attention
            return memory_efficient(*tensors, bias, keeps, dropout_p, is_causal, scale=scale)[0]
        if not cuda.math_sdp_enabled():
            raise RuntimeError("No available kernel. Aborting execution.")
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return aten._scaled_dot_product_attention_math(*tensors, attn_mask, dropout_p, is_causal, **options)[0]

    def _can_flash(self, query: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether flash attention can compute it, or cuDNN's, if that is the only kernel left on, which keeps as
        much."""
        is_on = cuda.flash_sdp_enabled() or (cuda.cudnn_sdp_enabled() and not cuda.mem_efficient_sdp_enabled())
        is_narrow = query.shape[-1] == value.shape[-1] <= 256
        return is_on and self._is_ampere and is_narrow and query.dtype in HALVES

    def _can_save_memory(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouped: bool) -> bool:
        """Whether the memory-efficient kernel can compute it: it needs vectors of 16 bytes, except in 32 bits before
        Ampere."""
        alignment = 8 if query.dtype in HALVES else 4 if self._is_ampere else 1
        starts = [x.storage_offset() for x in (query, key, value)] if self._is_ampere and not _is_older() else []
        return (
            cuda.mem_efficient_sdp_enabled()
            and query.dtype in (*HALVES, torch.float32)
            and not any(number % alignment for number in (query.shape[-1], value.shape[-1], *starts))
            and not (grouped and _is_older())
        )


def _is_older() -> bool:
    return release_of(torch.__version__) < NEWER_ATTENTION


def _validate(query: Any, key: Any, value: Any, mask: torch.Tensor | None, causal: bool) -> None:
    """Check the arguments as validate_sdpa_input in attention.cpp does, in torch's words."""
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{query.dtype} key.dtype: {key.dtype} and value.dtype: {value.dtype} instead."
        )
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: "
            f"{mask.dtype} and  query.dtype: {query.dtype} instead."
        )
    if mask is not None and causal:
        raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")


def _are_fusible(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouped: bool) -> bool:
    """Whether all have four dimensions, the last one without gaps, and as many samples and heads. Keys and values may
    have a divisor of the queries' heads if `grouped`, and one head in any case since torch 2.14."""
    tensors = query, key, value
    if any(x.dim() != 4 or x.stride(-1) != 1 for x in tensors) or query.shape[-1] != key.shape[-1]:
        return False
    samples, heads = zip(*(x.shape[:2] for x in tensors), strict=True)
    may_differ = grouped or (heads[1] == 1 and not _is_older())
    is_group = may_differ and heads[1] == heads[2] and heads[0] % heads[1] == 0
    return len(set(samples)) == 1 and (len(set(heads)) == 1 or is_group)


def _expanded(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask for all heads, copied unless its rows begin at multiples of 8 elements; preprocess_mask there."""
    width = mask.shape[-1]
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        mask = F.pad(mask, (0, 8 - width % 8))[..., :width]
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _as_cudnn(name: str, original: Callable[..., Any], assumed: Callable[[str], object]) -> Callable[..., Any]:
    def call(x: torch.Tensor, hidden: Any, weights: Any, *more: Any) -> Any:
        states = [hidden] if torch.is_tensor(hidden) else list(hidden)
        is_packed = torch.is_tensor(weights)  # then the other arguments differ
        is_projected = any(state.shape[-1] != states[0].shape[-1] for state in states)
        if is_packed or is_projected or not is_fake(x) or x.dim() != 3:
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
        out = x.new_empty((*x.shape[:2], directions * states[0].shape[-1]))
        between = layers - 1  # outputs that are the next layer's inputs
        reserve = x.new_empty((kept * layers + between) * out.numel())
        ctx.save_for_backward(x, *tensors, out, reserve)
        flops = 2 * samples * sum(weight.numel() for weight in weights if weight.dim() == 2)
        read = sum(weight.nbytes for weight in weights) + x.nbytes // steps
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
