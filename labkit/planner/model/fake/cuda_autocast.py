"""Imitates CUDA's autocast for plans made on CPU tensors: the CPU's own leaves layer norms and softmax in 16 bits and
pads in 32, for example. Runs in the planner's child process.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch.amp import autocast_mode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["HALVES", "cuda_lists", "follow_cuda"]

HALVES = (torch.bfloat16, torch.float16)
LIST = re.compile(r"#define AT_FORALL_(?!DEPRECATED)(\w+)\(_\)(.*)")
ENTRY = re.compile(r'_\((?:ADD_NS\()?(\w+)\)?(?:,\s*"?([\w.]+)"?)?')
BANNED = "binary_cross_entropy"  # under CUDA's autocast only

_cached: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weights in 16 bits
_library = torch.library.Library("aten", "IMPL")  # what it registers ends with it


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
    """Makes the CPU's autocast cast as CUDA's, and CUDA's be the CPU's, until the process ends."""
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
    with warnings.catch_warnings(action="ignore"):  # that there were kernels
        for operator, kernel in kernels.items():
            _library.impl(operator, kernel, "AutocastCPU")
    make, clear = torch.autocast.__init__, torch.clear_autocast_cache
    is_enabled, dtype_of, cast_inputs = torch.is_autocast_enabled, torch.get_autocast_dtype, autocast_mode._cast

    def on_cpu(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        make(self, _here(device_type), *args, **kwargs)

    def clear_all() -> None:  # at the end of the outermost autocast
        _cached.clear()
        clear()

    replacements: list[tuple[object, str, object]] = [
        (torch.autocast, "__init__", on_cpu),
        (autocast_mode, "_cast", lambda value, device_type, dtype: cast_inputs(value, _here(device_type), dtype)),
        (torch, "clear_autocast_cache", clear_all),
        (torch, "is_autocast_enabled", lambda device_type="cuda": is_enabled(_here(device_type))),
        (torch, "get_autocast_dtype", lambda device_type: dtype_of(_here(device_type))),
        (torch, "get_autocast_gpu_dtype", lambda: dtype_of("cpu")),
    ]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)


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
    """Return 32 bits, unless the caller names a type, without copying the argument."""
    if args[0].dtype in HALVES and kwargs.get("dtype") is None and not _names_type(operator, args):
        kwargs = {**kwargs, "dtype": torch.float32}
    return operator(*args, **kwargs)


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


def _names_type(operator: Any, args: Any) -> bool:
    """Whether the type is among the positional arguments."""
    names = [argument.name for argument in operator._schema.arguments[: len(args)]]
    return "dtype" in names and args[names.index("dtype")] is not None


def _as(dtype: torch.dtype, values: Any) -> Any:
    """Cast all but 64 bits, and weights once for all operators in an autocast, as CUDA's does."""

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
