"""Situations in which a strategy of docs/how_to/beyond.md is the planner's choice. decision_table.py prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import labkit
from labkit import Script, words
from labkit.planner.candidate import Candidate
from labkit.planner.planned import Plan
from labkit.planner.speed.collectives import wire
from labkit.planner.strategies.strategy import volume
from labkit.text import gib

__all__ = ["SITUATIONS", "Situation", "bytes_sent"]

SIZES, CONTEXT, LIMIT = "vocabulary=256, context=128, width=128, heads=4, layers=4", "context=128", "limit=2**20"


@dataclass(frozen=True)
class Situation:
    """A decoder of that width and number of layers over samples of `context` tokens, with experts if the task is
    "mixture"; `options` are those of labkit.plan, for the script of `asked`."""

    words: str
    choice: str  # what the planner chooses; tests/planner/test_beyond.py asserts it
    why: str
    width: int
    layers: int
    context: int
    options: Mapping[str, Any]
    asked: str = "fsdp"
    task: str = "bytes"

    def plan(self) -> Plan:
        script = Script.load(self.asked, task=self.task)
        model, data = script.cells["model"].text, script.cells["data"].text
        assert SIZES in model and CONTEXT in data and LIMIT in data, "the cells have changed"
        sizes = f"vocabulary=32000, context={self.context}, width={self.width}, heads={self.width // 64}"
        script = script.with_cells(
            model=model.replace(SIZES, f"{sizes}, layers={self.layers}"),
            data=data.replace(CONTEXT, f"context={self.context}").replace(LIMIT, "limit=2**24"),
        )
        return labkit.plan(script, **self.options)

    def row(self) -> str:
        """A row of the table: what is chosen, the best of the other strategies, and the bytes that both send."""
        plan = self.plan()
        assert plan.advice and plan.advice.best and plan.facts
        best = plan.advice.best
        others = [r for r in plan.advice.rows if r.strategy != best.strategy and r.step and r.peak]
        other = min(others, key=lambda r: (not r.fits, r.step.seconds if r.fits and r.step else 0, r.peak.bytes))  # type: ignore[union-attr]
        told = " | ".join(_told(one, plan) for one in (best, other))
        return f"| {self.words} | {told} | {self.why} |"


def bytes_sent(plan: Plan, one: Candidate) -> float:
    """Bytes that a rank sends in a step."""
    assert plan.facts and one.layout
    return sum(wire(each.kind, each.group) * each.bytes for each in volume(plan.facts, one.layout))


def _told(one: Candidate, plan: Plan) -> str:
    assert one.peak and one.step
    fits = "" if one.fits else f" of {gib(plan.device.usable_by(one.ranks))}: does not fit"
    waits = one.step.parts.get("communication", 0.0)
    return (
        f"{one.name}: {gib(one.peak.bytes)}{fits}, {words.seconds(one.step.seconds)}, of which {words.seconds(waits)} "
        f"waiting for {gib(bytes_sent(plan, one))}"
    )


SITUATIONS = (
    Situation(
        "1.5 B, one sequence of 65,536 tokens a step, 8 x H100",
        "context_parallel",
        "one sequence does not split over data ranks; tensor ranks sum all activations twice per block and hold all "
        "logits, 32,000 x 65,536 x 4 bytes = 7.8 GiB, and cross entropy holds several copies of them; "
        "context ranks gather keys and values and hold an eighth of the logits",
        2048,
        24,
        65536,
        {"device": "8xH100", "precision": "bf16", "global_batch_size": 1},
        asked="context_parallel",
    ),
    Situation(
        "0.27 B, one sequence of 49,152 tokens a step, 2 x T4",
        "context_parallel",
        "nothing else fits: a pipeline's rank holds what half the layers keep of the whole sequence, the last one also "
        "all logits, 32,000 x 49,152 x 4 bytes = 5.9 GiB; context ranks hold what all layers keep of half of it, and "
        "half of the logits",
        1024,
        12,
        49152,
        {"device": "2xT4", "precision": "fp16", "global_batch_size": 1},
        asked="context_parallel",
    ),
    Situation(
        "mixture of 8 experts, 3.6 B, 1,024 tokens a rank, 8 x L4",
        "expert_parallel",
        "a block has 8 experts of 2 x 2048 x 8192 parameters, 512 MiB in bf16, which FSDP gathers and whose gradients "
        "it reduces in fp32; tokens are 2 x 1,024 x 2048 x 2 bytes = 8 MiB, four times a step",
        2048,
        12,
        1024,
        {"device": "8xL4", "precision": "bf16", "global_batch_size": 8},
        task="mixture",
    ),
    Situation(
        "0.4 B, 16 samples of 1,024 tokens a rank, 4 hosts of 8 x A100 40, 10GbE",
        "diloco",
        "one all-reduce in 10 steps, which does not overlap, instead of one in each; the training is not the same",
        1024,
        24,
        1024,
        {"device": "A100 40", "nproc_per_node": 8, "nodes": 4, "network": "10GbE"}
        | {"precision": "bf16", "global_batch_size": 512},
        asked="diloco",
    ),
)
