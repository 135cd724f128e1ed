"""What the formulas say a step communicates, beside what torch's flight recorder saw of a real one.

gloo carries out a reduce-scatter as an all-reduce of the whole array, and is recorded so; its sends are not recorded.
"""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from strategies.test_collectives import FORWARD, KEEP, changed

import labkit
from labkit import Script
from labkit.planner.facts import Facts, facts_of
from labkit.planner.layout import layout_of
from labkit.planner.volume import volume

BATCH = 8
SIZES = {"Float": 4, "BFloat16": 2, "Int": 4}


@pytest.fixture(scope="module")
def facts() -> Facts:
    return facts_of(Script.load("single"), {"global_batch_size": BATCH})


def recorded(script: Script, ranks: int, **options) -> list[tuple[Counter, Counter]]:
    """(calls, bytes) by kind within one step, for each rank."""
    script = changed(script.name, {
        "\n@record\ndef main": KEEP,
        FORWARD: f"            began = time.time_ns()\n{FORWARD}",
        "            step += 1\n": "            keep_collectives(step, began)\n            step += 1\n",
    })  # fmt: skip
    env = {"TORCH_FR_BUFFER_SIZE": "4000"}
    run = labkit.launch(script, nproc_per_node=ranks, steps=4, global_batch_size=BATCH, env=env, wait=True, **options)
    seen = []
    for rank in range(ranks):
        calls, sizes = Counter(), Counter()
        for entry in json.loads((run.folder.path / f"collectives-{rank}.json").read_text()):
            shapes, kind = entry["output_sizes"], entry["profiling_name"].removeprefix("gloo:")
            calls[kind] += 1
            # DTensor's gather is recorded as what each rank gives
            parts = ranks if kind == "all_gather" and options.get("sequence_parallel") else 1
            sizes[kind] += SIZES[entry["output_dtypes"][0]] * sum(map(math.prod, shapes)) * parts
        seen.append((calls, sizes))
    return seen


def as_gloo(kind: str) -> str:
    return "all_reduce" if kind == "reduce_scatter" else kind


CASES = [
    ("ddp", 2, {}),
    ("tensor_parallel", 2, {"sequence_parallel": True, "activation_checkpointing": True, "accumulate": 2}),
]
MORE = [
    ("fsdp", 2, {"reshard_after_forward": "always", "precision": "bf16"}),
    ("hybrid", 4, {"tensor": 2}),
    ("fsdp", 4, {"replicas": 2}),
    ("zero1", 2, {"accumulate": 2}),
    ("ddp", 2, {"accumulate": 2, "bucket_mib": 0.2}),
    ("ddp", 2, {"find_unused_parameters": True}),
    ("zero2", 2, {"accumulate": 2}),
    ("fsdp", 2, {"accumulate": 2}),
    ("fsdp", 2, {"reshard_after_forward": "never", "activation_checkpointing": True}),
    ("fsdp1", 2, {"accumulate": 2}),
    ("fsdp1", 2, {"accumulate": 2, "sharding_strategy": "SHARD_GRAD_OP"}),
    ("fsdp1", 2, {"sharding_strategy": "NO_SHARD"}),
    ("fsdp1", 2, {"wrap": "none"}),
    ("tensor_parallel", 2, {"accumulate": 2, "activation_checkpointing": True}),
    ("tensor_parallel", 2, {"precision": "bf16"}),
    ("tensor_parallel", 2, {"sequence_parallel": True}),
    ("pipeline", 2, {"accumulate": 4}),
    ("hybrid", 4, {"pipeline": 2, "accumulate": 2}),
]


@pytest.mark.parametrize(
    ("name", "ranks", "options"), [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE)], ids=str
)
def test_the_formulas_agree_with_what_ranks_said_to_each_other(name, ranks, options, facts):
    script = Script.load(name)
    layout = layout_of(script, ranks, {"global_batch_size": BATCH, **options})

    for rank, (calls, sizes) in enumerate(recorded(script, ranks, **options)):
        expected, amounts = Counter(), Counter()
        for each in volume(facts, layout, rank):
            if each.kind != "send":
                expected[as_gloo(each.kind)] += each.count
                amounts[as_gloo(each.kind)] += each.bytes
        if name == "hybrid" and layout.pipeline == 1:  # a broadcast among one rank
            calls, sizes = calls - Counter(broadcast=1), sizes - Counter(broadcast=4)
        assert calls == expected
        assert sizes == amounts
