"""What the ranks say to each other in one optimizer step, counted within them by torch's flight recorder.

gloo carries out a reduce-scatter as an all-reduce, and is recorded so.
"""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest

import labkit
from labkit import Script
from labkit.record import RunReader

LAYERS, WIDTH, CONTEXT, BATCH = 4, 128, 128, 8
FLOAT = 4  # bytes
KEEP = """
def keep_collectives(step, began):
    if step == 3:
        entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]
        recent = [entry for entry in entries if entry["time_created_ns"] >= began]
        Path(os.environ["LABKIT_RUN_DIR"], f"collectives-{dist.get_rank()}.json").write_text(json.dumps(recent))


@record
def main"""
FORWARD = "            loss = forward_backward"
STAGE = """
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return self.unembed(x)
"""
IN_FLIGHT = """
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            out = self.unembed(x)
            if out.requires_grad:
                Stage.flying += 1
                Stage.most = max(Stage.most, Stage.flying)
                out.register_hook(lambda _: setattr(Stage, "flying", Stage.flying - 1))
            return out
"""


def changed(name: str, edits: dict[str, str]) -> Script:
    text = str(Script.load(name))
    for before, after in edits.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return Script.parse(text, name=name)


def one_step(name: str, ranks: int, **options) -> tuple[Counter, Counter, int]:
    """(calls, bytes of output) by collective within one step, the same on every rank, and the bytes of the model."""
    script = changed(name, {
        "\n@record\ndef main": KEEP,
        FORWARD: f"            began = time.time_ns()\n{FORWARD}",
        "            step += 1\n": "            keep_collectives(step, began)\n            step += 1\n",
    })  # fmt: skip
    env = {"TORCH_FR_BUFFER_SIZE": "4000"}
    run = labkit.launch(script, nproc_per_node=ranks, steps=5, global_batch_size=BATCH, env=env, **options)
    seen = []
    for rank in range(ranks):
        entries = json.loads((run.folder.path / f"collectives-{rank}.json").read_text())
        calls, sizes = Counter(), Counter()
        for entry in entries:
            kind = entry["profiling_name"].removeprefix("gloo:")
            calls[kind] += 1
            sizes[kind] += FLOAT * sum(map(math.prod, entry["output_sizes"]))
        seen.append((calls, sizes))
    assert all(each == seen[0] for each in seen)
    return *seen[0], said(run, "parameters")[0] * FLOAT


def said(run: labkit.Run, name: str) -> list:
    """What each rank's script reported."""
    return [history.values[name] for history in RunReader(run.folder).read_all().ranks.values()]


def test_ddp_all_reduces_every_gradient_once():
    calls, sizes, model = one_step("ddp", 2)

    assert calls == {"all_reduce": 2}  # a first bucket of 1 MiB, and the rest
    assert sizes["all_reduce"] == model


def test_zero1_also_broadcasts_every_parameter_from_its_owner():
    calls, sizes, model = one_step("zero1", 2)

    assert calls["all_reduce"] == 2
    assert calls["broadcast"] == 53  # one for each parameter tensor
    assert sizes == {"all_reduce": model, "broadcast": model}


@pytest.mark.parametrize(("name", "options", "gathers"), [
    pytest.param("fsdp", {"reshard_after_forward": "always"}, 2 * (LAYERS + 1), marks=pytest.mark.soak),  # lab 07
    ("fsdp", {}, 2 * (LAYERS + 1) - 1),  # the root is needed again at once: it stays
    ("zero2", {}, LAYERS + 1),
])  # fmt: skip
def test_sharding_gathers_each_block_and_the_root(name, options, gathers):
    calls, sizes, model = one_step(name, 2, **options)

    assert calls == {"all_gather": gathers, "all_reduce": LAYERS + 1}
    assert sizes["all_reduce"] == model
    if gathers == 2 * (LAYERS + 1):
        assert sizes["all_gather"] == 2 * model
    elif gathers == LAYERS + 1:
        assert sizes["all_gather"] == model
    else:
        assert model < sizes["all_gather"] < 2 * model


@pytest.mark.soak  # as lab 09 does
def test_tensor_parallel_sums_activations_twice_a_layer_each_way():
    calls, sizes, _ = one_step("tensor_parallel", 2)

    assert calls == {"all_reduce": 4 * LAYERS}
    assert sizes["all_reduce"] == 4 * LAYERS * BATCH * CONTEXT * WIDTH * FLOAT


@pytest.mark.soak
def test_a_pipeline_shares_one_number_besides_what_its_stages_send():
    calls, sizes, _ = one_step("pipeline", 2, accumulate=4)  # gloo's sends are not recorded

    assert (calls, sizes) == ({"broadcast": 1}, {"broadcast": FLOAT})


@pytest.mark.parametrize(("ranks", "options", "chunks"), [
    # lab 08 counts these in every run of its own
    pytest.param(2, {"schedule": "GPipe"}, [8, 8], marks=pytest.mark.soak),
    pytest.param(2, {"schedule": "1F1B"}, [2, 1], marks=pytest.mark.soak),
    pytest.param(4, {"schedule": "1F1B"}, [4, 3, 2, 1], marks=pytest.mark.soak),
    # half micro-batches: each has two stages here
    pytest.param(2, {"schedule": "Interleaved1F1B", "virtual_stages": 2}, [5, 3], marks=pytest.mark.soak),
])  # fmt: skip
def test_micro_batches_in_flight_are_what_the_schedule_allows(ranks, options, chunks):
    """min(m, p - r) under 1F1B, m under GPipe: what bounds the activations of a stage (PipeDream-2BW, Megatron)."""
    script = changed("pipeline", {
        STAGE: IN_FLIGHT,
        # anew in each step: in the first, torch runs a stage once more to learn its shapes
        FORWARD: f"            Stage.flying = Stage.most = 0\n{FORWARD}",
        "    # In this order gloo": "    report(rank, in_flight=Stage.most)\n    # In this order gloo",
    })  # fmt: skip
    run = labkit.launch(script, nproc_per_node=ranks, steps=3, global_batch_size=8, accumulate=8, **options)

    assert said(run, "in_flight") == chunks
