"""Measures, operator by operator, how much memory a piece of PyTorch takes in this process."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Meter"]


class Meter(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside it and not yet freed: `held` now, `curve` after each
    operator. Tensors that existed before do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = 0
        self.curve: list[int] = []
        self._sizes: dict[int, int] = {}  # of live storages, by address
        self._references: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        earlier = {storage._cdata for storage in _storages([args, kwargs])}
        made = operator(*args, **(kwargs or {}))
        for storage in _storages(made):
            if storage._cdata not in earlier and storage._cdata not in self._sizes:
                self._add(storage)
        self.curve.append(self.held)
        return made

    def _add(self, storage: Any) -> None:
        address, size = storage._cdata, storage.nbytes()
        self.held += size
        self._sizes[address] = size
        self._references[address] = weakref.ref(storage, lambda _: self._remove(address))

    def _remove(self, address: int) -> None:
        self.held -= self._sizes.pop(address)
        del self._references[address]


def _storages(values: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
