"""CUDA's autocast rules for plans made on CPU tensors: there layer norms, softmax and losses run in 32 bits, while the
CPU's autocast leaves most of them in 16, and some operators accept mixed types. Runs in the planner's child process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from labkit.launcher.checks import release_of

__all__ = ["IN_32_BITS", "follow_cuda"]

# aten/src/ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE: those in use in models, by the names
# that torch, torch.Tensor and torch.nn.functional have for them.
IN_32_BITS = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus layer_norm
native_layer_norm group_norm norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss
kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist cdist pdist renorm logsumexp cross_entropy
interpolate prod softmax softmin log_softmax cumprod cumsum sum vector_norm matrix_norm
""".split()  # noqa: SIM905
if release_of(version("torch")) >= (2, 12):
    IN_32_BITS.append("rms_norm")
# AT_FORALL_PROMOTE of the same file: 16 bits become 32 if another argument has 32. Under the CPU's autocast these
# operators refuse mixed types.
IN_WIDEST = """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sample index_put scatter_add tensordot
""".split()  # noqa: SIM905
OWNERS = (torch, torch.Tensor, F, torch.linalg)


def follow_cuda() -> None:
    """Make the CPU's autocast call these functions with 32-bit arguments, until the process ends."""
    for owner in OWNERS:
        for name in (*IN_32_BITS, *IN_WIDEST):
            if callable(function := getattr(owner, name, None)):
                setattr(owner, name, _in_32_bits(function, always=name in IN_32_BITS))


def _in_32_bits(function: Callable[..., Any], *, always: bool) -> Callable[..., Any]:
    """`always`: otherwise only if an argument has 32 bits already."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        wide = always or any(_is_float(value) for value in tree_leaves((args, kwargs)))
        if not wide or not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return function(*tree_map(_as_float, args), **tree_map(_as_float, kwargs))

    return call


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def _as_float(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value
