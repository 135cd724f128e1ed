"""Gives published formulas for the activations of a transformer block, for teaching and for checking the measured
ones."""

from __future__ import annotations

__all__ = ["block_activations"]

# In units of (samples x tokens x width): everything; all but what is cheap to recompute; the block's input.
KEPT = {"everything": 16, "selective": 11, "input": 1}


def block_activations(
    samples: int, tokens: int, width: int, heads: int, itemsize: int = 4, kept: str = "everything"
) -> int:
    """Bytes that a pre-norm block without dropout keeps for backward, with fused attention.

    Source: Korthikanti et al. (2205.05198) sec. 4.1: 34 s b h + 5 a s^2 b bytes at two bytes per element. Fused
    attention replaces the a s^2 term by the logarithm of each row's sum, and there are no dropout masks, which leaves
    16 elements per input element. "selective" is their selective recomputation of all but matrix products (measured:
    11), "input" is full recomputation. The two norms keep a mean and a deviation per token. These statistics are
    float32.
    """
    elements = samples * tokens * width * KEPT[kept]
    if kept == "input":
        return elements * itemsize
    statistics = samples * tokens * (heads + 2 * 2) if kept == "everything" else samples * tokens * heads
    return elements * itemsize + 4 * statistics
