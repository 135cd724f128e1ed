"""Recalls what torch's fake kernels returned for the same arguments, at a fraction of their cost: a plan calls most
operators again and again, in each layer, variant and strategy.

Runs in the planner's child process.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
UNFIT = {torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
VIEW, RECALLABLE, OTHER = range(3)

Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class Recalled:
    """The results of functional and in-place operators on fake tensors of one mode."""

    def __init__(self, mode: FakeTensorMode):
        self._mode = mode
        self._known: dict[Any, Any] = {}  # "first", or a description of each result and the type of their list

    def view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The views that torch's own kernel makes of a tensor without data; None if torch's fake one has to."""
        if not _is_simple(args[0]) or any(isinstance(arg, torch.Tensor) for arg in args[1:]):
            return None
        try:
            with in_kernel_invocation_manager(self._mode):
                views = func(*args, **kwargs)
        except Exception:  # told by torch's fake kernel
            return None
        if isinstance(views, torch.Tensor):
            return FakeTensor(self._mode, views, CPU)
        return type(views)(FakeTensor(self._mode, view, CPU) for view in views)

    def find(self, key: Any, args: Any) -> Any:
        """The results for a key; None if they are not known."""
        known = self._known.get(key)
        if known is None:
            return None
        if known == "first":
            return args[0]
        news, kind = known
        made = [None if new is None else self._made(new) for new in news]
        return kind(made) if kind else made[0]

    def _made(self, new: Shape) -> FakeTensor:
        with in_kernel_invocation_manager(self._mode):
            empty = torch.empty_strided(new[0], new[1], dtype=new[2], device="meta")
        return FakeTensor(self._mode, empty, CPU)

    def keep(self, key: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Keep results that can be made again from shapes, strides and types."""
        if out is args[0]:
            self._known[key] = "first"
            return
        many = type(out) in (tuple, list)
        results = [result for result in (out if many else [out]) if result is not None]
        if results and all(map(_is_new, results)) and _are_apart(results, tree_leaves((args, kwargs))):
            news = [None if result is None else shape_of(result) for result in (out if many else [out])]
            self._known[key] = news, type(out) if many else None


@cache
def way_of(func: Any) -> int:
    """VIEW if it looks at its first argument in another way; RECALLABLE if it makes new tensors, or writes its first
    argument and returns it, and only its arguments decide about the results."""
    returned = [result.alias_info for result in func._schema.returns]
    if func.namespace != "aten" or UNFIT & {*func.tags} or not returned:
        return OTHER
    if func.is_view:
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        return OTHER if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite) else VIEW
    aliases = [argument.alias_info for argument in func._schema.arguments]
    if not any(aliases) and not any(returned):
        return OTHER if func.overloadpacket is torch.ops.aten._unsafe_view else RECALLABLE
    is_in_place = len(returned) == 1 and aliases[0] and aliases[0].is_write and not any(aliases[1:])
    return RECALLABLE if is_in_place else OTHER


def key_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Equal for calls of an operator with the same results; None if values, aliases or other modes may decide."""
    if not args or not isinstance(args[0], torch.Tensor | list | tuple):
        return None
    key = [id(func), torch.get_default_dtype()]
    if not _describe(args, key) or (kwargs and not _describe([*kwargs, *kwargs.values()], key)):
        return None
    return tuple(key)


def _describe(values: Any, key: list[Any]) -> bool:
    """Extend the key by the values; returns whether it can."""
    for value in values:
        if isinstance(value, FakeTensor):
            if not _is_simple(value):
                return False
            key += (value.shape, value.stride(), value.dtype, value.requires_grad)
        elif type(value) in PLAIN:
            key += (type(value), value)
        elif type(value) in (list, tuple):
            key.append(len(value))
            if not _describe(value, key):
                return False
        else:
            return False
    return True


def _is_simple(tensor: Any) -> bool:
    return (
        isinstance(tensor, FakeTensor)
        and tensor.constant is None
        and tensor.layout is torch.strided
        and tensor.fake_device == CPU
        and not tensor.dtype.is_complex
        and not tensor.is_neg()
    )


def shape_of(tensor: torch.Tensor) -> Shape:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _are_apart(results: list[Any], arguments: list[Any]) -> bool:
    """Whether each result has a storage of its own: some decompositions return an argument."""
    tensors = [*results, *(argument for argument in arguments if isinstance(argument, torch.Tensor))]
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    return not any(storages.count(storage) > 1 for storage in storages[: len(results)])


def _is_new(tensor: Any) -> bool:
    """Whether it is a tensor whose storage is as large as its shape and strides say."""
    if not _is_simple(tensor) or tensor.storage_offset():
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    elements = last + 1 if tensor.numel() else 0
    return bool(tensor.untyped_storage().nbytes() == elements * tensor.element_size())
