"""What a rank would hold in the same step under other strategies: parameters, gradients and optimizer state divided as
in ZeRO (arXiv 1910.02054, section 5), activations and temporaries as observed.

Runs in the planner's child process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from labkit.planner.model.fake.fakes import Replicated, SharedOptimizer
from labkit.record import Peak
from labkit.worker import Tracker


class Shares(NamedTuple):
    """The fraction of the whole that a rank holds, the bytes of buffers that it always holds for communication, and of
    gathered parameters or gradients in forward and backward."""

    parameters: float
    gradients: float
    optimizer: float
    buckets: int = 0
    gathered: int = 0


class Weighed(Tracker):
    """A tracker that can tell the peak of the same step with other shares of the states."""

    def peak_with(self, now: Shares, then: Shares) -> Peak:
        """The highest total if the rank, which holds the shares `now`, held `then`."""
        weights = dict.fromkeys(Peak.CATEGORIES, 1.0) | {
            name: getattr(then, name) / getattr(now, name) for name in ("parameters", "gradients", "optimizer")
        }
        moments = [*self._moments()]
        kept = min(held.get("parameters", 0) for _, _, held in moments)  # without what FSDP1 gathers
        best = Peak(0, "", "", {})
        for phase, operation, held in moments:
            in_step = {"temporary": weights["optimizer"]} if phase == "optimizer" else {}
            sizes = {
                name: int(size * (weights | in_step)[name]) for name, size in (held | {"parameters": kept}).items()
            }
            sizes["communication"] = then.buckets + (0 if phase == "optimizer" else then.gathered)
            if (total := sum(sizes.values())) > best.bytes:
                best = Peak(total, phase, operation, {name: sizes[name] for name in Peak.CATEGORIES if sizes.get(name)})
        return best

    def _moments(self) -> Iterator[tuple[str, str, dict[str, int]]]:
        """The phase, operation and bytes by category after each change."""
        held: dict[str, int] = defaultdict(int)
        for number, size in self._before:
            held[Peak.CATEGORIES[self._categories[number]]] += size
        yield "forward", "", {**held}
        backward = max((i for i, (_, _, phase, _) in enumerate(self._events) if phase == "backward"), default=0)
        for i, (number, size, phase, operation) in enumerate(self._events):
            held[Peak.CATEGORIES[self._categories[number]]] += size
            in_closure = phase == "optimizer" and i < backward  # which computes the loss, as Lightning's
            yield "forward" if in_closure else phase, str(operation), {**held}


def strategy_in(modules: Sequence[nn.Module], optimizers: Iterable[Any]) -> str:
    """The script's own strategy; "" if another one splits its parameters."""
    if any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in modules):
        meshes = {p.device_mesh for module in modules for p in module.parameters() if isinstance(p, DTensor)}
        return "fsdp" if all(mesh.ndim == 1 for mesh in meshes) else ""
    if any(isinstance(p, DTensor) for module in modules for p in module.parameters()):
        return ""
    if any(isinstance(each, SharedOptimizer) for each in optimizers):
        return "zero1"
    return "ddp" if any(isinstance(module, Replicated) for module in modules) else "single"


def others(tracker: Weighed, strategy: str, ranks: int, modules: list[nn.Module], optimizers: list[Any]) -> Any:
    """The derived peaks by strategy, as tuples."""
    if ranks == 1 or not strategy:
        return {}
    whole, block = _sizes(modules)
    now = Shares(
        1 / ranks if strategy == "fsdp" else 1.0,
        1 / ranks if strategy == "fsdp" else 1.0,
        1.0 if strategy in ("ddp", "single") else 1 / ranks,
    )
    part = 1 / ranks
    shares = {
        "ddp": Shares(1.0, 1.0, 1.0, whole),
        "zero1": Shares(1.0, 1.0, part, whole),
        "zero2": Shares(1.0, part, part, gathered=block),
        "fsdp": Shares(part, part, part, gathered=min(whole, 2 * block)),
    }
    return {name: tracker.peak_with(now, then)._asdict() for name, then in shares.items() if name != strategy}


def _sizes(modules: list[nn.Module]) -> tuple[int, int]:
    """Bytes of all trained parameters, and of those of the largest block: the largest element of the list of modules
    that has most parameters, or all of them."""
    trained = {p: _bytes(p) for module in modules for p in module.parameters(recurse=False) if p.requires_grad}
    for module in modules:
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            flat = module._handle.flat_param
            trained[flat] = flat._unpadded_unsharded_size.numel() * flat.element_size()
    whole = sum(trained.values())

    def size(module: nn.Module) -> int:
        return sum(trained.get(p, _bytes(p)) for p in module.parameters() if p.requires_grad)

    lists = [module for module in modules if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1]
    longest = max(lists, key=size, default=None)
    block = max(map(size, longest), default=whole) if longest is not None else whole
    return whole, block


def _bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()
