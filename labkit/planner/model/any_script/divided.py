"""What a rank would hold in the same step under other strategies: parameters, gradients and optimizer state divided as
in ZeRO (arXiv 1910.02054, section 5), activations and temporaries as observed.

Runs in the planner's child process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from labkit.planner.strategies.known import CUSTOM, STRATEGIES
from labkit.planner.strategies.strategy import Layout, Strategy
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


def strategy_in(modules: Sequence[nn.Module], optimizers: Sequence[Any]) -> Strategy:
    """The script's own strategy, of those that divide most the first; CUSTOM if it is none that labkit knows."""
    return next((each for each in reversed(STRATEGIES.values()) if each.is_in(modules, optimizers)), CUSTOM)


def others(tracker: Weighed, own: Strategy, ranks: int, modules: list[nn.Module]) -> dict[str, Any]:
    """The derived peaks of the strategies that any script could use, by name."""
    if ranks == 1 or own is CUSTOM:
        return {}
    whole, block = _sizes(modules)

    def shares(strategy: Strategy) -> Shares:
        layout = Layout(strategy=strategy, ranks=ranks, data=ranks, micro_batch=1, options={"replicas": 1})
        by, gathered = strategy.divided(layout), min(whole, strategy.blocks_at_once * block)
        buckets = whole if strategy.has_buckets else 0
        return Shares(1 / by.parameters, 1 / by.gradients, 1 / by.optimizer, buckets, gathered)

    compared = (strategy for strategy in STRATEGIES.values() if strategy.for_any_script and strategy is not own)
    return {each.name: tracker.peak_with(shares(own), shares(each))._asdict() for each in compared}


def _sizes(modules: list[nn.Module]) -> tuple[int, int]:
    """Bytes of all trained parameters, and of those of the largest block: the largest element of the list of modules
    that has most parameters, or all of them."""
    trained = {p: p.nbytes for module in modules for p in module.parameters(recurse=False) if p.requires_grad}
    for module in modules:
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            flat = module._handle.flat_param
            trained[flat] = flat._unpadded_unsharded_size.numel() * flat.element_size()
    whole = sum(trained.values())

    def size(module: nn.Module) -> int:
        return sum(trained.get(p, p.nbytes) for p in module.parameters() if p.requires_grad)

    lists = [module for module in modules if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1]
    return whole, max(map(size, max(lists, key=size, default=())), default=whole)
