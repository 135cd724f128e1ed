"""What the formulas say a step communicates, beside what torch's flight recorder saw of a real one.

gloo carries out a reduce-scatter as an all-reduce of the whole array, and is recorded so; its sends are not recorded.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import cache

import pytest

import labkit
from labkit import Script
from labkit.planner.contract import able_to
from labkit.planner.layout import layout_of
from labkit.planner.model.facts import ModelFacts, facts_of
from labkit.planner.speed.collectives import COUNT, SUM
from labkit.planner.strategies.strategy import Layout, volume

BATCH = 8
SIZES = {"Char": 1, "Half": 2, "Float": 4, "BFloat16": 2, "Int": 4, "Double": 8, "Long": 8}
KEEP = """
def keep_collectives(step, began):
    import json

    if step == 3:
        entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]
        recent = [entry for entry in entries if entry["time_created_ns"] >= began]
        run = os.path.join(os.environ["LABKIT_RUNS"], os.environ["LABKIT_RUN"])
        with open(os.path.join(run, f"collectives-{dist.get_rank()}.json"), "w") as file:
            json.dump(recent, file)


@record
def main"""
FORWARD, STEP = "            loss = forward_backward", "            step += 1\n"


def loaded(name: str) -> Script:
    return Script.load(name, task="mixture" if name == "expert_parallel" else "bytes")


@cache
def facts(task: str = "bytes") -> ModelFacts:
    return facts_of(Script.load("single", task=task), {"global_batch_size": BATCH})


def recorded(script: Script, ranks: int, **options) -> list[tuple[Counter, Counter]]:
    """(calls, bytes) by kind within one step, for each rank."""
    text = str(able_to(script, options))
    for before, after in (
        ("\n@record\ndef main", KEEP),
        (FORWARD, f"            began = time.time_ns()\n{FORWARD}"),
        (STEP, f"            keep_collectives(step, began)\n{STEP}"),
        ("limit=2**20", "limit=2**16"),  # the test set, too, is smaller
    ):
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    script = Script.parse(text, name=script.name)
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


def to_itself(layout: Layout) -> list[tuple[str, int]]:
    """What a rank says in groups of its own alone: recorded, but no communication."""
    staged = layout.strategy.name in ("pipeline", "hybrid")
    count = [("all_reduce", COUNT)] if layout.data == 1 else []
    return [*count, *([("broadcast", SUM)] if staged and layout.pipeline == 1 else [])]


CASES = [
    ("ddp", 2, {}),
    ("context_parallel", 4, {"context_ranks": 2}),
    ("expert_parallel", 4, {"expert_ranks": 2}),
    ("tensor_parallel", 2, {"sequence_parallel": True, "activation_checkpointing": True, "accumulate": 2}),
]
MORE = [
    ("context_parallel", 2, {"accumulate": 2, "activation_checkpointing": True}),
    ("expert_parallel", 2, {"accumulate": 2, "activation_checkpointing": True}),
    ("expert_parallel", 2, {"precision": "bf16"}),
    ("fsdp", 2, {"reshard_after_forward": "always", "precision": "bf16"}),
    ("hybrid", 4, {"tensor": 2}),
    ("hybrid", 4, {"tensor": 2, "precision": "bf16", "activation_checkpointing": True}),
    ("hybrid", 4, {"pipeline": 2, "accumulate": 2, "precision": "bf16"}),
    ("fsdp", 4, {"replicas": 2}),
    ("zero1", 2, {"accumulate": 2}),
    ("ddp", 2, {"accumulate": 2, "bucket_mib": 0.2}),
    ("ddp", 2, {"find_unused_parameters": True}),
    ("ddp", 2, {"compress": "fp16", "bucket_mib": 0.2}),
    ("ddp", 2, {"compress": "int8", "bucket_mib": 0.2}),
    ("diloco", 2, {"sync_every": 1}),
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
def test_the_formulas_agree_with_what_ranks_said_to_each_other(name, ranks, options):
    script = loaded(name)
    layout = layout_of(script, ranks, {"global_batch_size": BATCH, **options})

    seen = recorded(script, ranks, **options)
    if name == "expert_parallel":  # tokens go where the router sends them: on average as many from each rank
        mean = sum(sizes["all_to_all"] for _, sizes in seen) / ranks
        for _, sizes in seen:
            sizes["all_to_all"] = mean
    for rank, (calls, sizes) in enumerate(seen):
        expected, amounts = Counter(), Counter()
        for each in volume(facts("mixture" if name == "expert_parallel" else "bytes"), layout, rank):
            if each.kind != "send":
                expected[as_gloo(each.kind)] += each.count
                amounts[as_gloo(each.kind)] += each.bytes
        for kind, size in to_itself(layout):
            expected[kind] += 1
            amounts[kind] += size
        assert calls == expected
        assert sizes == amounts


def test_a_ring_sends_what_the_formulas_say():
    """gloo's sends are counted by the script: keys and values, and in backward their gradients as well."""
    text = str(able_to(Script.load("context_parallel"), {"accumulate": 2}))
    for line, say in (
        (
            "        box = torch.empty_like(tensor)\n",
            'print("sent", tensor.numel() * tensor.element_size(), flush=True)',
        ),
        ("            step += 1\n", '    print("step ends", flush=True)'),
    ):
        assert text.count(line) == 1
        text = text.replace(line, f"{line}        {say}\n")
    options = {"global_batch_size": BATCH, "accumulate": 2, "attention": "ring", "context_ranks": 2}
    script = Script.parse(text, name="context_parallel")
    run = labkit.launch(script, nproc_per_node=2, steps=1, wait=True, **options)
    sends = [each for each in volume(facts(), layout_of(script, 2, options)) if each.kind == "send"]
    for rank in range(2):
        step, _, _ = run.logs(rank=rank, stream="stdout").partition("step ends")
        sent = [int(line.split()[1]) for line in step.splitlines() if line.startswith("sent ")]
        assert len(sent) == sum(each.count for each in sends)
        assert sum(sent) == sum(each.bytes for each in sends)
