"""Has all strategies, by name."""

from labkit.planner.strategies.context_parallel import ContextParallel
from labkit.planner.strategies.ddp import DDP
from labkit.planner.strategies.diloco import DiLoCo
from labkit.planner.strategies.expert_parallel import ExpertParallel
from labkit.planner.strategies.fsdp import FSDP
from labkit.planner.strategies.fsdp1 import FSDP1
from labkit.planner.strategies.hybrid import Hybrid
from labkit.planner.strategies.pipeline import Pipeline
from labkit.planner.strategies.single import Single
from labkit.planner.strategies.strategy import Strategy
from labkit.planner.strategies.tensor_parallel import TensorParallel
from labkit.planner.strategies.zero1 import ZeRO1
from labkit.planner.strategies.zero2 import ZeRO2

# From the one that keeps most on each rank to those that divide most; what trains otherwise comes last.
STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        *(Single(), DDP(), ZeRO1(), ZeRO2(), FSDP(), FSDP1(), TensorParallel(), Pipeline(), Hybrid()),
        *(ContextParallel(), ExpertParallel(), DiLoCo()),
    )
}


class Custom(Strategy):
    """A strategy cell that a user wrote: it is rehearsed, but nothing else is known about it."""

    unknown = "the strategy cell is not one of labkit's"


CUSTOM = Custom()


def strategy_named(name: str) -> Strategy:
    """The strategy of labkit's script with this name; for any other, that of a user's own strategy cell."""
    return STRATEGIES.get(name, CUSTOM)


def simplest(ranks: int) -> Strategy:
    """The simplest strategy for this number of ranks."""
    return min(
        (each for each in STRATEGIES.values() if each.ranks_of(ranks) == ranks), key=lambda each: each.simplicity
    )
