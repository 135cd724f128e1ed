"""What other estimators of training memory say, in bytes per rank: for the tables, beside our own.

accelerate's is called; DeepSpeed and the playbook's calculator are not installed, their published formulas are.
"""

from __future__ import annotations

from accelerate.commands.estimate import estimate_training_usage

from labkit.planner.layout import Layout
from labkit.planner.model.facts import ModelFacts

__all__ = ["OTHERS"]

STAGES = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3, "fsdp1": 3}  # as ZeRO counts them
HALF = ("bf16", "fp16")


def accelerate(facts: ModelFacts, layout: Layout) -> float | None:
    """`accelerate estimate-memory`, the column of training with Adam: a multiple of the weights, for one device."""
    if layout.strategy not in STAGES:
        return None
    usage = estimate_training_usage(facts.elements * 4, "bfloat16" if layout.precision in HALF else "float32")
    return max(usage.values())


def deepspeed(facts: ModelFacts, layout: Layout) -> float | None:
    """`estimate_zero2_model_states_mem_needs` and `estimate_zero3_…` without offload. Source: DeepSpeed's
    documentation, Memory Requirements: 4 params + 16 params/N; 4 x largest layer + 18 params/N. States only.
    """
    stage, elements = STAGES.get(layout.strategy, 0), facts.elements
    if stage == 2:
        return 4 * elements + 16 * elements / layout.shards
    if stage == 3:
        largest = max(size for unit in facts.units for size in unit.parameters)
        return 4 * largest + 18 * elements / layout.shards
    return None


def playbook(facts: ModelFacts, layout: Layout, *, tokens: int, width: int, heads: int, blocks: int) -> float | None:
    """The Ultra-Scale Playbook ("First steps: training on one GPU" and "Data parallelism: ZeRO"): 16 bytes per
    parameter, of which the stage divides 12, 14 or all by N, and L s b h (34 + 5 n s / h) of activations in 16 bits,
    twice that in 32; with recomputation only each block's input.
    """
    if layout.strategy not in STAGES:
        return None
    elements, ranks = facts.elements, layout.ranks
    stage = STAGES[layout.strategy]
    parameters, gradients, rest = (4, 4, 8) if layout.precision not in HALF else (2, 2, 12)
    states = (
        parameters / (ranks if stage == 3 else 1)
        + gradients / (ranks if stage >= 2 else 1)
        + rest / (ranks if stage >= 1 else 1)
    )
    per_token = 2 if layout.activation_checkpointing else 34 + 5 * heads * tokens / width
    wide = 1 if layout.precision in HALF else 2
    return states * elements + wide * blocks * tokens * layout.micro_batch * width * per_token


OTHERS = {"accelerate": accelerate, "DeepSpeed": deepspeed, "playbook": playbook}
