"""What a rank would hold in the same step under other strategies: parameters, gradients and optimizer state divided as
in ZeRO (arXiv 1910.02054, section 5), activations and temporaries as observed.

Runs in the planner's child process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from labkit.planner.strategies.known import CUSTOM, STRATEGIES
from labkit.planner.strategies.strategy import Layout, Strategy
from labkit.record import Peak
from labkit.worker import Tracker


class Shares(NamedTuple):
    """The fraction of the whole that a rank holds, and the bytes that it holds for communication: always, and in
    forward and backward. `communication` is None where that is as observed."""

    parameters: float
    gradients: float
    optimizer: float
    communication: tuple[int, int] | None = None


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
            if then.communication:
                sizes["communication"] = then.communication[0] if phase == "optimizer" else sum(then.communication)
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


def strategy_in(modules: Sequence[nn.Module], optimizers: Sequence[Any]) -> Strategy:
    """The script's own strategy, of those that divide most the first; CUSTOM if it is none that labkit knows."""
    return next((each for each in reversed(STRATEGIES.values()) if each.is_in(modules, optimizers)), CUSTOM)


def others(tracker: Weighed, own: Strategy, ranks: int, modules: list[nn.Module], on_gpu: bool) -> dict[str, Any]:
    """The derived peaks of the strategies that any script could use, by name."""
    if ranks == 1 or own is CUSTOM:
        return {}
    trained, computed, outside, block = _sizes(modules)

    def shares(strategy: Strategy) -> Shares:
        layout = Layout(strategy=strategy, ranks=ranks, data=ranks, micro_batch=1, options={"replicas": 1})
        by = strategy.divided(layout)
        parts = 1 / max(by.parameters, by.gradients), 1 / by.gradients, 1 / by.optimizer
        if strategy.has_buckets:  # on a GPU, also those of the first step: Replicated.replaced
            buckets = trained, trained if on_gpu else 0
            return Shares(*parts, None if own.has_buckets else buckets)
        kept = computed if by.parameters < by.gradients else outside
        return Shares(*parts, (0, min(kept + strategy.blocks_at_once * block, computed + block)))

    compared = (strategy for strategy in STRATEGIES.values() if strategy.for_any_script and strategy is not own)
    return {each.name: tracker.peak_with(shares(own), shares(each))._asdict() for each in compared}


def _sizes(modules: list[nn.Module]) -> tuple[int, int, int, int]:
    """Bytes of all trained parameters; and, in the type in which they are computed with, of all parameters, of those
    outside of blocks, and of the largest block, or all. Blocks are the elements of the list of modules with most."""
    trained = {p: p.nbytes for module in modules for p in module.parameters(recurse=False) if p.requires_grad}
    computed = {p: p.nbytes for module in modules for p in module.parameters(recurse=False)}
    for module in modules:
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            flat, elements = module._handle.flat_param, module._handle.flat_param._unpadded_unsharded_size.numel()
            trained |= {flat: elements * flat.element_size()} if flat.requires_grad else {}
            computed[flat] = elements * (module._handle._fwd_bwd_param_dtype or flat.dtype).itemsize
        elif isinstance(module, FSDPModule) and (dtype := module._get_fsdp_state()._mp_policy.param_dtype):
            computed |= {p: p.numel() * dtype.itemsize for p in module.parameters()}
    whole = sum(computed.values())

    def size(module: nn.Module) -> int:
        return sum(computed.get(p, p.nbytes) for p in module.parameters())

    lists = [module for module in modules if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1]
    blocks = max(lists, key=size, default=nn.ModuleList())
    return sum(trained.values()), whole, whole - size(blocks), max(map(size, blocks), default=whole)
