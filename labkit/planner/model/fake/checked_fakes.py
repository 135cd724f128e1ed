"""Checks the sizes of tensors without data against real ones: some of torch's fake kernels return less than the real
operator, for example no workspace of an LSTM.

Runs in the planner's child process.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
from torch.utils.flop_counter import flop_registry

from labkit.planner.model.fake.recalled import OTHER, RECALLABLE, VIEW, Recalled, Shape, key_of, shape_of, way_of

aten = torch.ops.aten
DEVICE: Any = torch.ops.prim.device.default  # half of all calls
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# torch's own namespaces: decompositions and collectives
TRUSTED = {"prims", "c10d", "_c10d_functional"}
# operators whose sizes are known to be right; their checks took longest
KNOWN = {aten._scaled_dot_product_flash_attention_for_cpu, aten._unsafe_view, aten.nll_loss_forward, aten.stack,
         aten.var_mean}  # fmt: skip
FACTORIES = ("empty", "full", "new_", "ones", "zeros")
GROUPED: Any = getattr(getattr(aten, "_grouped_mm", None), "default", None)  # older torch has none
BINS: Any = aten.bincount.default
CTC: Any = {aten._ctc_loss.Tensor, aten._ctc_loss.default}  # lengths as tensors, or as numbers
LAYER_NORM: Any = aten.native_layer_norm.default
# Operators with more results than one that tests/cuda_dispatch has compared with CUDA's, to the byte.
COMPARED = {
    "_fused_rms_norm",
    "_thnn_fused_lstm_cell",
    "_weight_norm_interface",
    "adaptive_max_pool2d",
    "cudnn_batch_norm",
    "log_sigmoid_forward",
    "native_batch_norm",
    "native_layer_norm",
    "nll_loss2d_forward",
}
# Operators whose fake kernels look at the device, which decides what they keep for backward.
BY_DEVICE = {aten._embedding_bag, aten.log_sigmoid_forward, aten.native_layer_norm}
BATCH_NORMS = {aten._native_batch_norm_legit, aten.native_batch_norm}
ROUTING = {aten.topk, aten.argmax}
# operators, with the index of the argument that may be a condition
SELECTING = {aten.masked_select: 1, aten.index: 1, aten.index_put: 1, aten.index_put_: 1}
MOST_BYTES = 1 << 28  # of an operator's arguments
PADDING = 4096  # bytes by which an allocation may be larger


class CopiedAlone(TorchFunctionMode):
    """Copies tensors without data. deepcopy would also copy the mode that each of them refers to, and then they would
    share no memory with their views; and it fails at constants."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__ or not isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            copied, trained = tensor.detach().clone(), tensor.requires_grad
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            memo[id(tensor)] = torch.nn.Parameter(copied, trained) if is_parameter else copied.requires_grad_(trained)
        return memo[id(tensor)]


class CheckedFakeMode(FakeTensorMode):
    """Runs an operator of forward once for each combination of arguments on real zeros. Where its results take more
    memory than the fake ones, or have other strides, they get the real sizes and strides; `corrected` names operators
    with larger results. Views, products, convolutions, attention and the operators that torch defines for all backends
    (its core set) are not checked: their results have the sizes that their shapes say.

    What a condition selects depends on values, which fake tensors lack: after a router (topk or argmax), the elements
    of a condition are taken to be divided evenly among its experts, or, if `skewed`, to go to as few as possible;
    otherwise all of it is selected. `assumed` has a sentence for each kind; `experts` is their largest number.
    """

    def __init__(self, skewed: bool = False, on_gpu: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.corrected: set[str] = set()
        self.assumed: set[str] = set()
        self.experts = 0
        self._skewed, self._on_gpu, self._says_gpu = skewed, on_gpu, False
        self._experts, self._each = 0, 1  # from which the latest router chose, and how many for each token
        self._left = 0  # choices that no expert has got yet
        self._corrections: dict[Any, list[Shape | None]] = {}
        self._recalled = Recalled(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Scripts are not compiled in a plan, so no call need be kept from the compiler, which costs time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        way = OTHER if self._says_gpu else _way_of(func)
        if way == VIEW:
            views = self._recalled.view(func, args, kwargs or {})
            return self._dispatched(func, types, args, kwargs) if views is None else views
        key = key_of(func, args, kwargs) if way == RECALLABLE else None
        known = None if key is None else self._recalled.find(key, args)
        if known is not None:
            return known
        out = self._dispatched(func, types, args, kwargs)
        if key is not None:
            self._recalled.keep(key, args, kwargs, out)
        return out

    def _dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "labkit":  # a record of work
            return None
        if func.overloadpacket is aten.nonzero or (
            func.overloadpacket in SELECTING
            and any(map(_is_condition, tree_leaves(args[SELECTING[func.overloadpacket]])))
        ):
            return self._selected(func, args, kwargs or {})
        if func is BINS and (bins := _bins(*args, **(kwargs or {}))):
            self.assumed.add("bincount is assumed to see no value above its minlength")
            with self:
                return torch.zeros(bins[0], dtype=bins[1])
        if func in CTC:
            return self._aligned(*args)
        is_literal = self._on_gpu and not self._says_gpu  # else a kernel's own
        if is_literal and kwargs and getattr(kwargs.get("device"), "type", "") == "cuda":
            kwargs = {**kwargs, "device": CPU}
        if func is GROUPED and args[0].dtype != torch.bfloat16:
            return self._grouped(args, kwargs or {})
        if func._schema.name == "fsdp::chunk_cat" and any(tensor.is_sparse for tensor in args[0]):
            raise SystemExit("FSDP2 does not reduce-scatter sparse gradients: omit sparse=True, or use ddp")
        out = self._on_device(func, types, args, kwargs)
        if func.overloadpacket in ROUTING and args[0].dim() > 1:
            self._experts, self._left = args[0].shape[-1], -1
            self._each = args[1] if func.overloadpacket is aten.topk else 1
            self.experts = max(self.experts, self._experts)
        if not is_suspect(func) or (func is LAYER_NORM and not _mixes_types(args)):
            return out
        if self._on_gpu and func.namespace == "aten":  # real ones would be the CPU's
            if func.overloadpacket.__name__ not in COMPARED and _keeps_more(func, args):
                self.assumed.add(
                    f"{func.overloadpacket} was never compared with CUDA's: what it keeps may differ there"
                )
            return out
        leaves, spec = tree_flatten(out)
        if not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return out
        key = func, str(tree_map(_key, (args, kwargs)))
        if key not in self._corrections:
            self._corrections[key] = self._compared(func, args, kwargs or {}, leaves)
        for i, shape in enumerate(self._corrections[key]):
            if shape:
                with self:
                    leaves[i] = torch.empty_strided(shape[0], shape[1], dtype=shape[2])
        return tree_unflatten(leaves, spec)

    def _on_device(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The results of torch's fake kernels, `on_gpu` for tensors on a GPU. Below autograd, which would need a CUDA
        build, it is enough that they say so."""
        call: Any = self.dispatch if func.namespace == "aten" else super().__torch_dispatch__
        if self._on_gpu and func.overloadpacket in BATCH_NORMS and args[0].dtype.itemsize == 2:
            out, *statistics = call(func, types, args, kwargs)
            with self:  # a CPU's have 16 bits, and none in evaluation
                return out, *(torch.empty(args[0].shape[1], dtype=torch.float32) for _ in statistics)
        if not self._on_gpu or func.overloadpacket not in BY_DEVICE:
            return call(func, types, args, kwargs or {})
        _say_device((args, kwargs), GPU)
        self._says_gpu = True
        try:
            out = call(func, types, args, kwargs)
        finally:
            self._says_gpu = False
            _say_device((args, kwargs), CPU)
        _say_device(out, CPU)
        return out

    def _grouped(self, args: Any, kwargs: Any) -> Any:
        """Compute the products of the experts: torch's fake kernel takes bf16 only, but its real ones take other types,
        too."""

        def in_half(tensor: torch.Tensor) -> torch.Tensor:
            dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)

        with self:
            args_in_half, kwargs_in_half = tree_map_only(torch.Tensor, in_half, (args, kwargs))
            return GROUPED(*args_in_half, **kwargs_in_half).to(args[0].dtype)

    def _aligned(self, log_probs: Any, targets: Any, _: Any, lengths: Any, *more: Any) -> Any:
        """The losses and log alpha of CTC, whose size depends on the longest target."""
        time, batch, _ = log_probs.shape
        if isinstance(lengths, torch.Tensor):
            longest = targets.shape[1] if targets.dim() == 2 else -(-len(targets) // batch)
            self.assumed.add("CTC's targets are assumed to be equally long")
        else:
            longest = max(lengths)
        with self:
            return log_probs.new_empty(batch), log_probs.new_empty(batch, time, 2 * longest + 1)

    def _selected(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator that selects by conditions."""

        def numbers(value: Any) -> Any:
            return self._chosen(value).unbind(1) if _is_condition(value) else [value]

        with self:
            if func.overloadpacket is aten.nonzero:
                return self._chosen(args[0])
            if func.overloadpacket is aten.masked_select:
                return args[0].expand(args[1].shape).reshape(-1)[: len(self._chosen(args[1]))].clone()
            indices = [index for value in args[1] for index in numbers(value)]
            return func(args[0], indices, *args[2:], **kwargs)

    def _chosen(self, condition: Any) -> Any:
        """The result as `nonzero` returns it."""
        if self._experts:
            self.assumed.add(f"each of {self._experts} experts is assumed to get the same share of the tokens")
        else:
            self.assumed.add("a condition is assumed to select everything")
        chosen = condition.numel() // max(1, self._experts)
        if self._skewed and self._experts:
            self._left = condition.numel() if self._left < 0 else self._left
            chosen = min(self._left, condition.numel() // self._each)
            self._left -= chosen
        return torch.zeros(chosen, condition.dim(), dtype=torch.int64)

    def _compared(self, func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> list[Shape | None]:
        """The real size, strides and type of each result, if they take more memory or have other strides."""
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        if sum(tensor.untyped_storage().nbytes() for tensor in inputs) > MOST_BYTES:
            return [None] * len(leaves)
        try:
            reals = tree_leaves(func(*tree_map(_zeros, args), **tree_map(_zeros, kwargs)))
        except Exception:  # not every operator takes zeros, or runs on this CPU
            return [None] * len(leaves)
        corrections: list[Shape | None] = [None] * len(leaves)
        for i, (real, fake) in enumerate(zip(reals, leaves, strict=True)):
            if isinstance(real, torch.Tensor) and isinstance(fake, FakeTensor) and not real.is_sparse:
                is_larger = real.untyped_storage().nbytes() > fake.untyped_storage().nbytes() + PADDING
                if is_larger:
                    self.corrected.add(str(func.overloadpacket))
                if is_larger or _is_strided_otherwise(real, fake):
                    corrections[i] = shape_of(real)
        return corrections


@cache
def _way_of(func: Any) -> int:
    """How the mode's earlier results may serve: not for operators that it treats by more than their arguments."""
    is_special = func.overloadpacket in {*ROUTING, *SELECTING, aten.nonzero} or func in {BINS, GROUPED, *CTC}
    return OTHER if is_special else way_of(func)


def _keeps_more(func: Any, args: Any) -> bool:
    """Whether a kernel in forward has results beside the first, such as a workspace, which differ between devices."""
    return len(func._schema.returns) > 1 and any(getattr(leaf, "requires_grad", False) for leaf in tree_leaves(args))


def _say_device(values: Any, device: torch.device) -> None:
    for leaf in tree_leaves(values):
        if isinstance(leaf, FakeTensor):
            leaf.fake_device = device


@cache
def is_suspect(func: Any) -> bool:
    """Whether its results may have another size than its arguments and torch's definition say."""
    if func.namespace != "aten":
        return func.namespace not in TRUSTED
    returns = func._schema.returns
    is_new = any(r.alias_info is None for r in returns)
    is_backward = "backward" in func.__name__  # what it makes lives briefly
    is_known = func.overloadpacket in {*KNOWN, *flop_registry} or func.__name__.startswith(FACTORIES)
    is_core = torch.Tag.core in func.tags and func is not LAYER_NORM
    is_defined = is_core or torch.Tag.pointwise in func.tags
    return is_new and not (is_backward or is_known or is_defined)


def _mixes_types(args: Any) -> bool:
    """Whether a layer norm's input and weight differ in type: its fake statistics have the input's, real ones the
    weight's."""
    x, _, weight, *_ = args
    return weight is not None and weight.dtype != x.dtype


def _is_strided_otherwise(real: torch.Tensor, fake: torch.Tensor) -> bool:
    """Whether the strides differ, so that what follows may copy one result and not the other. Strides of single
    elements do not matter."""
    if real.shape != fake.shape:
        return False
    return any(size > 1 and a != b for size, a, b in zip(real.shape, real.stride(), fake.stride(), strict=True))


def _is_condition(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _bins(values: Any, weights: Any = None, minlength: int = 0) -> tuple[int, torch.dtype] | None:
    """The size and type of bincount's result; None if only the values tell."""
    weighted = torch.float32 if weights is not None and weights.dtype == torch.float32 else torch.float64
    return (minlength, torch.int64 if weights is None else weighted) if minlength else None


def _key(value: Any) -> Any:
    return shape_of(value) if isinstance(value, torch.Tensor) and not value.is_sparse else value


def _zeros(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
