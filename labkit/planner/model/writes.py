"""Watches what a model's forward writes to its parameters and buffers, beside what the optimizer does.

One rank computes it from all samples and once a step. What several ranks, several micro-batches or a recomputation make
of it may be something else, which no error shows.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.checking import STATISTICS, WRITE_APART, WRITE_LOST, WRITE_OF_RANK_0
from labkit.text import listed
from labkit.worker import COLLECTIVES

SAMPLES = 1  # the bit of what depends on a rank's own samples or random numbers; further bits are those of tensors
OVERWRITES = {"copy_", "_foreach_copy_", "fill_", "zero_"}
FEW_SAMPLES = 16  # for BatchNorm: Group Normalization, arXiv 1803.08494, figure 1
COMBINE = "; combine the samples of all ranks in forward, or train on one rank"
ELSE = ": this trains something else than one rank does"
LOST = f"{WRITE_LOST}{ELSE}; use ddp, or write after the optimizer's step"
OVERWRITTEN = f"{WRITE_OF_RANK_0}{ELSE}{COMBINE}"
APART = f"{WRITE_APART}{ELSE}{COMBINE}"
REPEATED = "forward writes to {names} with every micro-batch, {parts} times a step instead of once"
RECOMPUTED = "forward writes to {names} twice, because activation checkpointing runs it again in backward"


class _Write(NamedTuple):
    storage: int
    is_buffer: bool
    depends_on: int


class Writes(TorchDispatchMode):
    """Enter it around forward and backward. `model` is the one before it is parallelized, whose names are used, and
    `batch` the tensors that differ between ranks."""

    def __init__(self, model: nn.Module, batch: Iterable[torch.Tensor]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._modules = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        self._depends_on = {_address(tensor): SAMPLES for tensor in batch}
        self._before: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._bits: dict[str, int] = {}
        self._own: dict[int, int] = {}  # bits by address
        self._used = 0  # bits of those whose values from before this forward were used
        self._written: dict[str, _Write] = {}
        self._again: set[str] = set()

    def __enter__(self) -> Writes:
        for number, (name, tensor, _) in enumerate(self._tensors(), 1):
            self._before[name] = weakref.ref(tensor), _address(tensor)
            self._bits[name] = self._own[_address(tensor)] = 1 << number
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return out
        if torch._C._current_graph_task_id() >= 0:  # in backward
            if self._written:
                self._again |= {name for name, *_ in self._targets(func, args, kwargs or {})}
            return out
        read = _tensors_in((args, kwargs))
        if func.namespace in COLLECTIVES:
            for tensor in (*read, *_tensors_in(out)):
                self._depends_on.pop(_address(tensor), None)
            return out
        self._note(func, args, kwargs or {}, read, out)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, read: list[torch.Tensor], out: Any) -> None:
        changed = [*_changed(func, args, kwargs)]
        to_change, sources = {*map(_address, changed)}, {*map(_address, read)}
        overwrites = func._overloadname == "out" or func.overloadpacket.__name__ in OVERWRITES
        replaced = to_change if overwrites and all(map(_is_whole, changed)) else set()
        depends_on = SAMPLES if torch.Tag.nondeterministic_seeded in func.tags else 0
        for address in sources - replaced:
            depends_on |= self._own.get(address, 0) | self._depends_on.get(address, 0)
            self._used |= 0 if func.is_view or address in to_change else self._own.get(address, 0)
        for address in {*map(_address, _tensors_in(out))} - sources | replaced:
            self._depends_on[address] = depends_on
        for address in to_change - replaced:
            self._depends_on[address] = depends_on | self._depends_on.get(address, 0)
        for name, address, is_buffer in self._targets(func, args, kwargs) if changed else ():
            before = self._written[name].depends_on if name in self._written else 0
            self._written[name] = _Write(address, is_buffer, before | depends_on)
        for address in replaced:
            self._own.pop(address, None)  # what is read now is not from before

    def _targets(self, func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, int, bool]]:
        """The parameters and buffers that an operator changes, with the addresses of their storages."""
        targets = [tensor for tensor in _changed(func, args, kwargs) if _may_belong_to_a_model(tensor)]
        for target in targets:
            address, start = _address(target), target.storage_offset()
            for name, tensor, is_buffer in self._tensors():
                if _address(tensor) == address and 0 <= start - tensor.storage_offset() < max(1, tensor.numel()):
                    yield name, address, is_buffer

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Parameters and buffers as forward sees them: FSDP replaces those of a unit while it computes."""
        for module, prefix in self._modules.items():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    tensor = vars(module).get(name, tensor)  # FSDP1 puts a view of all parameters in its place
                    if tensor is not None and not STATISTICS.search(prefix + name):
                        yield prefix + name, tensor, tensors is module._buffers

    def notes(self, ranks: int, parts: int, *, broadcasts: bool) -> list[str]:
        """What `ranks` data ranks and `parts` micro-batches make of the writes, in sentences. `broadcasts`: before
        each forward, rank 0 sends its buffers to the others, as under DDP."""
        now = {name: _address(tensor) for name, tensor, _ in self._tensors()}
        written = {
            name: write
            for name, write in (self._written | self._assigned()).items()
            if not write.is_buffer or self._used & self._bits.get(name, 0)
        }
        bits = sum(self._bits.get(name, 0) for name in written)
        kept = {name: write for name, write in written.items() if now.get(name) == write.storage}
        of_a_rank = [name for name, write in kept.items() if write.depends_on & SAMPLES]
        sent = [name for name in of_a_rank if broadcasts and kept[name].is_buffer]
        repeated = [name for name, write in kept.items() if write.depends_on & (SAMPLES | bits)]
        sentences = {
            LOST: [name for name in written if name not in kept and ranks > 1],
            OVERWRITTEN: sent if ranks > 1 else [],
            APART: [name for name in of_a_rank if name not in sent and ranks > 1],
            REPEATED: repeated if parts > 1 else [],
            RECOMPUTED: [name for name in repeated if name in self._again],
        }
        return [text.format(names=listed(names), parts=parts) for text, names in sentences.items() if names]

    def _assigned(self) -> dict[str, _Write]:
        """What is another tensor now, or has other data."""
        assigned = {}
        for name, tensor, is_buffer in self._tensors():
            before, place = self._before.get(name, (None, 0))
            address = _address(tensor)
            if hasattr(tensor, "_fsdp_flattened"):  # FSDP1 assigns its own parts
                continue
            if (before and before() is not tensor and is_buffer) or (before and place != address):
                assigned[name] = _Write(address, is_buffer, self._depends_on.get(address, 0))
        return assigned


def _tensors_in(values: Any) -> list[torch.Tensor]:
    """Of a distributed one, this rank's part."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return [tensor for tensor in local if tensor.layout is torch.strided]


def _address(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.untyped_storage()._cdata)


def _changed(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator changes."""
    return _tensors_in([args[at] if at < len(args) else kwargs.get(name) for at, name in _changing(func)])


@cache
def _changing(func: Any) -> list[tuple[int, str]]:
    """The arguments that an operator changes."""
    arguments = enumerate(func._schema.arguments)
    return [(at, each.name) for at, each in arguments if each.alias_info and each.alias_info.is_write]


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _may_belong_to_a_model(tensor: torch.Tensor) -> bool:
    """Whether it is not a result of forward that autograd follows."""
    return tensor.is_leaf or (tensor._base is not None and tensor._base.is_leaf)


def few_samples(model: nn.Module, batch: int, parts: int) -> list[str]:
    """A sentence on the BatchNorms of a model that see so few samples at a time, one of `parts` parts of the global
    batch, that the model trains worse."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    samples = batch // parts
    if parts == 1 or samples >= FEW_SAMPLES or all(isinstance(norm, nn.SyncBatchNorm) for norm in norms):
        return []
    return [
        f"BatchNorm takes its statistics from {samples} samples at a time, not from the {batch} of the global batch: "
        f"below {FEW_SAMPLES}, accuracy suffers (arXiv 1803.08494, figure 1); use a larger batch, or GroupNorm"
    ]
