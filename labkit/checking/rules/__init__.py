"""The rules, one module for each topic, which registers them when it is imported.

A rule is a function that looks at a Tree and yields (node, message) for each mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from labkit.checking.findings import KINDS
from labkit.checking.syntax.tree import Placed, Tree

# The code of each rule for flake8 and SARIF: 1 is LK001. A new rule gets the next number. The line of a rule that is
# renamed or removed stays, so that a number keeps its meaning.
NUMBERS = {
    "sharded-state-dict": 1,
    "save-on-every-rank": 2,
    "optimizer-not-saved": 3,
    "load-without-map-location": 4,
    "load-without-weights-only": 5,
    "optim-state-dict-order": 6,
    "no-destroy-process-group": 7,
    "rank-0-collective": 8,
    "rank-0-evaluation": 9,
    "download-race": 10,
    "hard-coded-world-size": 11,
    "hard-coded-port": 12,
    "device-zero": 13,
    "no-set-device": 14,
    "device-id-int": 15,
    "device-map-under-torchrun": 16,
    "four-bit-under-fully-shard": 17,
    "labels-shifted-twice": 18,
    "mean-loss-accumulated": 19,
    "frozen-base-in-checkpoints": 20,
    "reentrant-checkpointing-under-ddp": 21,
    "no-distributed-sampler": 22,
    "shuffle-with-sampler": 23,
    "no-set-epoch": 24,
    "stream-without-length": 25,
    "unscaled-fp16": 26,
    "mean-in-loss-of": 27,
    "scaler-of-shards": 28,
    "clip-scaled-gradients": 29,
    "clip-of-shards": 30,
    "averaged-twice": 31,
    "local-batchnorm": 32,
    "replaced": 33,
    "local-rank-argument": 34,
    "checkpoint-reentrant": 35,
    "item-every-step": 36,
    "no-no-sync": 37,
    "data-parallel": 38,
    "bf16-on-t4": 39,
    "positions-not-split": 40,
    "router-seeded-by-rank": 41,
    "model-not-split": 42,
    "all-experts-on-a-rank": 43,
    "moved-before-sharding": 44,
    "optimizer-before-wrapping": 45,
    "one-shard-unit": 46,
    "module-of-sharded": 47,
    "sparse-gradients-sharded": 48,
    "double-backward-sharded": 49,
    "no-sync-of-fsdp2": 50,
    "no-such-setting": 51,
    "no-such-value": 52,
    "settings-unused": 53,
    "fsdp1-setting": 54,
    "reshard-of-other-version": 55,
    "wrap-setting-unused": 56,
    "loading-without-sync": 57,
    "checkpointing-twice": 58,
    "processes-not-divisible": 59,
    "deepspeed-set-twice": 60,
    "changed-after-ddp": 61,
    "requires-grad-of-module": 62,
    "ddp-bypassed": 63,
    "branch-under-ddp": 64,
    "step-without-sync": 65,
    "tied-weights-parted": 66,
    "accelerate-scheduler": 67,
    "accelerate-shards-twice": 68,
    "accelerate-accumulation": 69,
    "split-seeded-by-rank": 70,
    "stream-not-split": 71,
    "unmatched-keys": 72,
    "bf16-updates-lost": 73,
    "loss-keeps-graph": 74,
    "rank-decides-alone": 75,
    "rank-steps-scheduler-alone": 76,
    "collective-in-join": 77,
    "read-before-written": 78,
    "ranks-started-twice": 79,
    "divided-twice": 80,
    "accumulation-cleared": 81,
    "root-not-sharded": 82,
    "optimizer-of-other-model": 83,
    "data-split-in-tensor-parallel": 84,
    "loaded-on-one-rank": 85,
}

Mistakes = Iterator[tuple[Placed, str]]
Looks = Callable[[Tree], Mistakes]


@dataclass(frozen=True)
class Rule:
    """`slug` is its name on the command line and in `# labkit: ignore[slug]`; `misses` lists what it does not catch."""

    slug: str
    kind: str
    why: str
    fix: str
    misses: str
    looks: Looks

    @property
    def number(self) -> str:
        """`LK001`, for tools that know rules by letters and digits."""
        return f"LK{NUMBERS.get(self.slug, 0):03}"


RULES: dict[str, Rule] = {}


def rule(slug: str, kind: str, *, why: str, fix: str, misses: str) -> Callable[[Looks], Looks]:
    """Register the decorated function as a rule. It yields the node of each mistake and one sentence."""
    assert kind in KINDS, f"kind must be one of {', '.join(KINDS)}, got {kind!r}"
    assert slug not in RULES, f"two rules are named {slug!r}"

    def register(looks: Looks) -> Looks:
        RULES[slug] = Rule(slug, kind, why, fix, misses, looks)
        return looks

    return register
