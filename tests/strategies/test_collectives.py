"""What the ranks say to each other in one optimizer step, counted within them by torch's flight recorder.

gloo carries out a reduce-scatter as an all-reduce, and is recorded so.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from strategies.matrix import edited

import labkit
from labkit import Script
from labkit.record import RunReader

LAYERS, WIDTH, CONTEXT, BATCH = 4, 128, 128, 8
FLOAT = 4  # bytes
KEEP = """
import json
from pathlib import Path


def keep_collectives(step, began):
    if step == 3:
        entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]
        recent = [entry for entry in entries if entry["time_created_ns"] >= began]
        Path(os.environ["KEPT"], f"collectives-{dist.get_rank()}.json").write_text(json.dumps(recent))


@record
def main"""
FORWARD = "            loss = forward_backward"
STAGE = "            return self.unembed(x)\n"
IN_FLIGHT = """
            out = self.unembed(x)
            if out.requires_grad:
                Stage.flying += 1
                Stage.most = max(Stage.most, Stage.flying)
                out.register_hook(lambda _: setattr(Stage, "flying", Stage.flying - 1))
            return out
"""


def one_step(name: str, ranks: int, kept: Path, *extras: str, **options) -> tuple[Counter, Counter, int]:
    """(calls, bytes of output) by collective within one step, the same on every rank, and the bytes of the model.

    Without the one number that every step sums: over how many predictions the loss is the mean.
    """
    script = edited(
        Script.load(name, *extras),
        {
            "\n@record\ndef main": KEEP,
            FORWARD: f"            began = time.time_ns()\n{FORWARD}",
            "            step += 1\n": "            keep_collectives(step, began)\n            step += 1\n",
            "limit=2**20": "limit=2**16",  # the test set, too, is smaller
        },
    )
    env = {"TORCH_FR_BUFFER_SIZE": "4000", "KEPT": str(kept)}
    run = labkit.launch(script, nproc_per_node=ranks, steps=5, global_batch_size=BATCH, env=env, **options)
    seen = []
    for rank in range(ranks):
        entries = json.loads((kept / f"collectives-{rank}.json").read_text())
        if name != "diloco":  # whose replicas do not add up their numbers of predictions
            count, *entries = entries
            assert (count["profiling_name"], count["output_sizes"]) == ("gloo:all_reduce", [[]])
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


def test_ddp_all_reduces_every_gradient_once(tmp_path):
    calls, sizes, model = one_step("ddp", 2, tmp_path)

    assert calls == {"all_reduce": 2}  # a first bucket of 1 MiB, and the rest
    assert sizes["all_reduce"] == model


@pytest.mark.soak
def test_zero1_also_broadcasts_every_parameter_from_its_owner(tmp_path):
    calls, sizes, model = one_step("zero1", 2, tmp_path)

    assert calls["all_reduce"] == 2
    assert calls["broadcast"] == 53  # one for each parameter tensor
    assert sizes == {"all_reduce": model, "broadcast": model}


@pytest.mark.parametrize(
    ("name", "options", "gathers"),
    [
        pytest.param("fsdp", {"reshard_after_forward": "always"}, 2 * (LAYERS + 1), marks=pytest.mark.soak),  # lab 05
        ("fsdp", {}, 2 * (LAYERS + 1) - 1),  # the root is needed again at once: it stays
        pytest.param("zero2", {}, LAYERS + 1, marks=pytest.mark.soak),
    ],
)
def test_sharding_gathers_each_block_and_the_root(name, options, gathers, tmp_path):
    calls, sizes, model = one_step(name, 2, tmp_path, *(["fsdp_options"] if options else []), **options)

    assert calls == {"all_gather": gathers, "all_reduce": LAYERS + 1}
    assert sizes["all_reduce"] == model
    if gathers == 2 * (LAYERS + 1):
        assert sizes["all_gather"] == 2 * model
    elif gathers == LAYERS + 1:
        assert sizes["all_gather"] == model
    else:
        assert model < sizes["all_gather"] < 2 * model


@pytest.mark.soak  # as lab 14 does
def test_tensor_parallel_sums_activations_twice_a_layer_each_way(tmp_path):
    calls, sizes, _ = one_step("tensor_parallel", 2, tmp_path)

    assert calls == {"all_reduce": 4 * LAYERS}
    assert sizes["all_reduce"] == 4 * LAYERS * BATCH * CONTEXT * WIDTH * FLOAT


@pytest.mark.soak
def test_a_pipeline_shares_one_number_besides_what_its_stages_send(tmp_path):
    calls, sizes, _ = one_step("pipeline", 2, tmp_path, accumulate=4)  # gloo's sends are not recorded

    assert (calls, sizes) == ({"broadcast": 1}, {"broadcast": FLOAT})


@pytest.mark.parametrize(
    ("ranks", "options", "chunks"),
    [
        # lab 13 counts these in every run of its own
        pytest.param(2, {"schedule": "GPipe"}, [8, 8], marks=pytest.mark.soak),
        pytest.param(2, {"schedule": "1F1B"}, [2, 1], marks=pytest.mark.soak),
        pytest.param(4, {"schedule": "1F1B"}, [4, 3, 2, 1], marks=pytest.mark.soak),
        # half micro-batches: each has two stages here
        pytest.param(2, {"schedule": "Interleaved1F1B", "virtual_stages": 2}, [5, 3], marks=pytest.mark.soak),
    ],
)
def test_micro_batches_in_flight_are_what_the_schedule_allows(ranks, options, chunks):
    """min(m, p - r) under 1F1B, m under GPipe: what bounds the activations of a stage (PipeDream-2BW, Megatron)."""
    script = edited(
        Script.load("pipeline"),
        {
            STAGE: IN_FLIGHT,
            # from zero in each step: in the first, torch runs a stage once more to learn its shapes
            FORWARD: f"            Stage.flying = Stage.most = 0\n{FORWARD}",
            "    del model, optimizer": "    report(in_flight=Stage.most)\n    del model, optimizer",
        },
    )
    run = labkit.launch(script, nproc_per_node=ranks, steps=3, global_batch_size=8, accumulate=8, **options)

    assert said(run, "in_flight") == chunks
