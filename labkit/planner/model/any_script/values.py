"""Tensors without data, of which a training script may read what a loss could be.

Runs in the planner's child process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from labkit.planner.model.fake.checked_fakes import CheckedFakeMode
from labkit.planner.model.fake.fake_run import here

aten = torch.ops.aten
ITEM: Any = aten._local_scalar_dense.default
LIKELY = 1.0  # of what a script reads, as of a loss
# Operators whose results are known if those of all arguments are.
CONDITIONS = {aten.isnan, aten.isinf, aten.isfinite, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge,
              aten.logical_and, aten.logical_or, aten.logical_not, aten.bitwise_and, aten.bitwise_or,
              aten.bitwise_not, aten.any, aten.all, aten.mul, aten._to_copy, aten.alias, aten.clone, aten.view,
              aten.detach}  # fmt: skip
OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[3]))  # torch and labkit


class Count(int):
    """A number of matches, such as of right predictions, which is assumed. It must not become the size of a tensor."""


class LikelyValues(CheckedFakeMode):
    """A number read from a floating-point tensor is taken to be 1, conditions follow from it, and a count of what is
    true is taken to be 1. All other values are refused. `read` are the places at which the script, which is in the
    file `script`, read numbers: its lines, or libraries."""

    def __init__(self, script: str, on_gpu: bool = False) -> None:
        super().__init__(on_gpu=on_gpu)
        self.read: dict[str, None] = {}
        self._script = script
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # one value of all elements of a tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ITEM:
            return self._item(func, args[0])
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(out, FakeTensor) and not out.is_floating_point():
            if func.overloadpacket in CONDITIONS and (value := self._computed(func, args, kwargs or {})) is not None:
                self._known[out] = value
            elif func.overloadpacket is aten.sum and args[0].dtype == torch.bool:
                self._known[out] = Count(1)
        return out

    def _chosen(self, condition: Any) -> Any:
        if isinstance(condition, FakeTensor):
            return super()._chosen(condition)
        with _disable_current_modes():  # of data, which have values
            return condition.nonzero()

    def counts(self, tensor: Any) -> bool:
        """Whether a tensor is the number of what is true."""
        return tensor in self._known and type(self._known[tensor]) is Count

    def _item(self, func: Any, tensor: Any) -> Any:
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes():
                return func(tensor)
        value = self._value(tensor)
        if value is None:
            raise DataDependentOutputException(func)
        self.note_read()
        return value

    def note_read(self) -> None:
        """Remember the line of the script that reads a number, or the library that does."""
        frame: FrameType | None = sys._getframe(1)
        library = ""
        while frame and frame.f_code.co_filename != self._script:
            file = frame.f_code.co_filename
            if not library and not file.startswith(OWN):
                library = file.partition("site-packages/")[2].partition("/")[0]
            frame = frame.f_back
        self.read[library or (f"line {frame.f_lineno}" if frame else "")] = None

    def _value(self, tensor: Any) -> Any:
        if tensor in self._known:
            return self._known[tensor]
        if tensor.constant is not None:
            with _disable_current_modes():
                return tensor.constant.flatten()[0].item() if tensor.numel() == 1 else None
        return LIKELY if tensor.is_floating_point() else None

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The value of all elements of the result, if those of the arguments are known."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not all(isinstance(tensor, FakeTensor) and self._value(tensor) is not None for tensor in tensors):
            return None

        def one(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return torch.full([1] * value.dim(), self._value(value), dtype=value.dtype)

        if func.overloadpacket is aten.view:
            return self._value(tensors[0])
        with _disable_current_modes():
            return func(*tree_map(one, args), **tree_map(one, kwargs)).flatten()[0].item()


class OnCpu(TorchFunctionMode):
    """What a script asks of tensors that are not on a device, or have no data: a device "cuda" is the CPU if `on_gpu`,
    an array of a floating-point tensor has ones."""

    def __init__(self, fake: LikelyValues | None, on_gpu: bool) -> None:
        super().__init__()
        self._fake, self._on_gpu = fake, on_gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._on_gpu:
            kwargs = {
                key: here(value) if key == "device" else value for key, value in kwargs.items() if key != "pin_memory"
            }
        first = args[0] if args else None
        if isinstance(first, FakeTensor):
            if name == "data_ptr":  # the same for tensors with the same storage only, as accelerate takes it to be
                return first.untyped_storage()._cdata + first.storage_offset() * first.element_size()
            if name == "__deepcopy__" and first.constant is not None:  # real, which a copy's constant would not be
                return args[1].setdefault(id(first), first.clone())
            if name == "__format__" and first.dim() == 0:
                return format(first.item(), args[1])
            if name in ("item", "__int__", "__index__") and self._fake and self._fake.counts(first):
                if name != "item":  # what it returns would not be told from other numbers
                    raise DataDependentOutputException(ITEM)
                return Count(first.item())
            if name in ("numpy", "__array__") and first.is_floating_point() and self._fake:
                self._fake.note_read()
                with _disable_current_modes():
                    return torch.ones(first.shape, dtype=first.dtype).numpy()
        if any(type(leaf) is Count for leaf in _numbers(args)):
            raise DataDependentOutputException(ITEM)
        return func(*args, **kwargs)


def _numbers(args: Any) -> list[Any]:
    """The numbers among arguments, also in slices."""
    found = []
    for arg in args:
        if isinstance(arg, tuple | list):
            found += _numbers(arg)
        elif isinstance(arg, slice):
            found += [arg.start, arg.stop, arg.step]
        elif isinstance(arg, int):
            found.append(arg)
    return found
