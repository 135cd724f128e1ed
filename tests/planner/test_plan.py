"""labkit.plan as its user has it: a prediction that is there before the run, and honest gaps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from strategies.matrix import IMAGES, script

import labkit
from labkit import Script
from labkit.hardware.machine import hardware
from labkit.planner.data_sheets import device_named
from labkit.planner.layout import layout_of
from labkit.planner.memory.ledger import UnknownToFormulas
from labkit.planner.memory.peak import peak, worst
from labkit.planner.model.facts import facts_of
from labkit.planner.model.rehearsal import rehearse
from labkit.planner.speed.speed_model import SpeedModel
from labkit.planner.strategies import staged
from labkit.planner.strategies.known import STRATEGIES
from labkit.version import release_of

DDP = Script.load("ddp")
MODEL, DATA = DDP.cells["model"].text, DDP.cells["data"].text
FORWARD = "return self.unembed(self.blocks(self.embed(tokens)))"
COMPARED = {name for name, strategy in STRATEGIES.items() if strategy.is_usual and not strategy.for_some}


def by_formulas(plan):
    return worst(plan.facts, plan.layout, on_gpu=not plan.device.shared)[1]


def test_a_plan_is_written_before_the_run_and_stands_beside_what_it_measures(runs_dir):
    plan = labkit.plan("fsdp", nproc_per_node=2, global_batch_size=8)

    assert plan.fits
    with pytest.raises(labkit.LaunchError, match=r"this plan is for 2 ranks with global_batch_size=8, not .*=16; make"):
        labkit.launch(plan, global_batch_size=16)
    with pytest.raises(labkit.LaunchError, match=r"this plan is for 2 ranks .*, not nproc_per_node=3"):
        labkit.launch(plan, nproc_per_node=3)

    run = labkit.launch(plan, steps=4, wait=True)

    first_rank = min(json.loads(run.folder.metrics(rank).open().readline())["time"] for rank in range(2))
    assert run.folder.plan.stat().st_mtime < first_rank
    for held in run.memory().ranks:
        assert set(held.peaks) == {"planned", "measured"} if held.rank == plan.rank else {"measured"}
        assert held.traced.bytes == pytest.approx(held.planned.bytes, rel=0.06)
        assert held.at_start < held.process
    told = str(run.memory())
    assert "planned" in told
    assert "measured" in told
    assert "rank 1: " in told
    assert "its resident set" in told or "'s resident set peaked at" in told


def test_a_plan_for_hosts_is_one_for_all_their_ranks_and_is_launched_on_none_of_them():
    asked = {"device": "A100 40", "global_batch_size": 64}
    one, four = (
        labkit.plan("fsdp", **asked, **more)
        for more in ({"nproc_per_node": 16}, {"nproc_per_node": 4, "nodes": 4, "network": "1GbE"})
    )

    assert four.peak == one.peak
    assert four.step.seconds > 5 * one.step.seconds
    assert "(4 hosts with 4 each)" in str(four)
    assert "shards (16) span hosts (1 Gbit/s per host)" in str(four)
    assert "fits with 4 replicas" in str(four)
    assert four.record()["nodes"] == 4
    with pytest.raises(labkit.LaunchError, match="this plan is for 4 hosts with 4 ranks each, but a plan"):
        labkit.launch(four)
    with pytest.raises(labkit.LaunchError, match="on a cluster, submit its script and parameters"):
        labkit.submit(four, time="10")


def test_a_run_without_a_plan_or_a_trace_says_how_to_get_one():
    run = labkit.launch(script("single"), nproc_per_node=1, steps=1, global_batch_size=4, wait=True)

    assert "no step was traced; launch(…, trace_memory=True) traces" in str(run.memory())


def test_planning_leaves_torch_out_of_the_kernel():
    code = "import sys, labkit; labkit.plan('single', nproc_per_node=1, device='T4'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_thousand_ranks_are_rehearsed_on_one_machine():
    peak = rehearse(Script.load("fsdp"), 1024, {"global_batch_size": 1024}).peak

    # a dimension of 1 is padded to 1,024 shards of one row each: more than the thousandth of the parameters
    assert 0 < peak.categories["parameters"] < 4 * 875_264 / 100


def test_a_model_that_looks_at_its_weights_while_it_is_built_is_planned():
    looks = MODEL.replace(
        "        self.norm, self.head", "        self.scale = torch.rand(()).item()\n        self.norm, self.head"
    )
    plan = labkit.plan(DDP.with_cells(model=looks), nproc_per_node=2)

    assert not plan.problems
    assert plan.bytes == by_formulas(plan).bytes


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        (
            {"model": MODEL.replace(FORWARD, FORWARD.replace(")))", ") * len(tokens.flatten().bincount())))"))},
            r"not rehearsed: the 'model' cell, line \d+ .*: bincount depends on values, .*minlen",
        ),
        (
            {
                "data": DATA.replace(
                    "    text = b", "    raise FileNotFoundError('no such file: train.npz')\n    text = b"
                )
            },
            r"^cannot be planned: the 'data' cell, line 11 .*FileNotFoundError: no such file: train.npz$",
        ),
    ],
    ids=["data-dependent", "no data"],
)
def test_what_cannot_be_followed_through_a_step_is_said_and_its_states_are_planned(cells, problem):
    plan = labkit.plan(DDP.with_cells(**cells), nproc_per_node=2, device="T4")

    assert plan.peak is None
    assert re.search(problem, plan.problems[-1])
    if plan.states:
        assert plan.fits is None
        assert plan.states["parameters"] == plan.states["gradients"] == plan.states["optimizer"] // 2 == 4 * 875_264
        assert "its activations need more, but that is unknown" in str(plan)


def test_targets_may_be_a_list_with_one_tensor_per_sample():
    collate = (
        "\n\ndef collate(samples):\n    tokens, labels = zip(*samples)\n    return torch.stack(tokens), list(labels)\n"
    )
    task = DDP.cells["task"].text.replace("batch[1]", "torch.stack(tuple(batch[1]))")
    plan = labkit.plan(DDP.with_cells(data=DATA + collate, task=task), nproc_per_node=2, global_batch_size=16)

    assert not plan.problems
    assert plan.bytes == pytest.approx(by_formulas(plan).bytes, rel=0.01)


def test_a_parameter_without_a_gradient_is_said_before_ddp_stops_at_it():
    idle = MODEL.replace(
        "        self.norm, self.head", "        self.idle = nn.Parameter(torch.zeros(3))\n        self.norm, self.head"
    )
    script = DDP.with_cells(model=idle)

    with pytest.raises(labkit.LaunchError, match="DDP would stop in the second step: the loss does not depend on idle"):
        labkit.plan(script, nproc_per_node=2)
    assert not labkit.plan(script, nproc_per_node=2, find_unused_parameters=True).problems


def test_a_strategy_of_the_users_own_is_rehearsed():
    own = Script.load("fsdp")
    cell = own.cells["strategy"].text.replace("mp_policy=policy)", "mp_policy=policy, shard_placement_fn=None)")
    plan = labkit.plan(own.with_cells(strategy=cell), nproc_per_node=2)

    assert plan.peak == labkit.plan("fsdp", nproc_per_node=2).peak


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("hybrid", {"nproc_per_node": 4, "tensor": 3}, "4 ranks cannot be split into pipeline=1 x tensor=3"),
        ("fsdp", {"nproc_per_node": 4, "replicas": 3}, "4 ranks cannot be split into replicas=3"),
        (
            "ddp",
            {"nproc_per_node": 3},
            "global_batch_size=64 cannot be split evenly into 3 data ranks x 1 micro-batches",
        ),
        ("ddp", {"device": "2xT5"}, "unknown device '2xT5'; did you mean 'T4'"),
        ("ddp", {"device": "T5"}, "unknown device 'T5'; did you mean 'T4'"),
        ("ddp", {"nproc_per_node": 0}, "nproc_per_node must be"),
        ("ddp", {"nproc_per_node": "many"}, "nproc_per_node must be"),
        (
            "pipeline",
            {"nproc_per_node": 3, "global_batch_size": 3, "accumulate": 3},
            "4 blocks cannot be split into 3 pipeline stages",
        ),
        ("tensor_parallel", {"nproc_per_node": 3}, "4 heads of out cannot be split across 3 tensor ranks"),
    ],
    ids=str,
)
def test_an_impossible_setting_raises_and_says_what_to_do(script, options, message):
    with pytest.raises(labkit.LabError, match=message):
        labkit.plan(script, **options)


SCALAR = MODEL.replace("        self.norm,", "        self.scale = nn.Parameter(torch.ones(()))\n        self.norm,")
SPARSE = MODEL.replace("nn.Embedding(vocabulary, width)", "nn.EmbeddingBag(vocabulary, width, sparse=True)").replace(
    "self.tokens(tokens)", "self.tokens(tokens.reshape(-1, 1)).unflatten(0, tokens.shape)"
)


MEAN = """def metrics_of(outputs, batch):
    return {"acc": (outputs.argmax(-1) == batch[1]).float().mean()}
"""
NO_PAIR = r"metrics_of must return \{name: \(sum, count\)\}, .* they returned \{'acc': "
IN_NUMPY = MEAN.replace(".mean()", ".numpy().mean()")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_a_plan_evaluates_two_samples_with_the_users_own_functions(strategy):
    with pytest.raises(labkit.LaunchError, match=NO_PAIR):
        labkit.plan(Script.load(strategy).with_cells(metrics_of=MEAN), nproc_per_node=2)

    assert labkit.plan(Script.load(strategy).with_cells(metrics_of=IN_NUMPY), nproc_per_node=2).fits


PENALTY = MODEL + "\ndef slope(y, x):\n    return torch.autograd.grad(y, x, create_graph=True)\n"


@pytest.mark.parametrize(
    ("model", "message"),
    [(SCALAR, "give scale the shape"), (SPARSE, "omit sparse=True"), (PENALTY, "Use DDP or ZeRO-1")],
)
def test_a_plan_of_what_fsdp_cannot_train_raises(model, message):
    with pytest.raises(labkit.LaunchError, match=message):
        labkit.plan(Script.load("fsdp").with_cells(model=model), nproc_per_node=2)


RECURRENT = """
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.blocks = nn.ModuleList(nn.LSTM(16, 16, batch_first=True) for _ in range(2))

    def embed(self, x):
        return self.tokens(x)

    def unembed(self, x):
        return self.head(x)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x, _ = block(x)
        return self.unembed(x)
"""


def test_a_recurrent_model_is_planned_where_it_trains_and_refused_where_it_does_not():
    def planned(strategy, **options):
        return labkit.plan(Script.load(strategy).with_cells(model=RECURRENT), nproc_per_node=2, **options)

    with pytest.raises(labkit.LaunchError, match="LSTM returned a tuple: a block of a pipeline must return one tensor"):
        planned("pipeline", accumulate=2)
    with pytest.raises(labkit.LaunchError, match="LSTM has no qkv, out, up, down to split"):
        planned("tensor_parallel")
    plan = planned("fsdp")
    refused = {row.strategy for row in plan.advice.rows if not row.layout or not row.peak}
    assert plan.fits
    assert {"pipeline", "tensor_parallel"} <= refused


def test_a_device_without_a_number_is_as_many_as_this_machine_would_run_ranks_and_the_plan_says_so():
    here = hardware().default_ranks
    plan = labkit.plan("ddp", device="RTX 4090")

    assert plan.ranks == here
    assert str(plan).startswith(f"ddp on {here} x RTX 4090 ")
    assert f"as many as this machine would run ranks, {here}; for one, pass '1xRTX 4090'" in str(plan)


@pytest.mark.skipif(release_of(torch.__version__) < (2, 11), reason="the script itself refuses before torch 2.11")
def test_a_pipeline_of_a_single_micro_batch_is_planned_where_torch_would_train_it(monkeypatch):
    monkeypatch.setattr(staged, "version", lambda package: "2.11.0")
    assert labkit.plan("pipeline", nproc_per_node=2, device="T4").fits

    monkeypatch.setattr(staged, "version", lambda package: "2.10.0+cu128")
    with pytest.raises(labkit.LaunchError, match="needs at least 2 micro-batches before torch 2.11; accumulate is 1"):
        labkit.plan("pipeline", nproc_per_node=2, device="T4")


def test_options_of_extras_are_planned_as_they_are_launched():
    plan = labkit.plan(
        "fsdp",
        nproc_per_node=2,
        device="2xT4",
        global_batch_size=16,
        precision="fp16",
        accumulate=2,
        activation_checkpointing=True,
        reshard_after_forward="never",
    )

    assert (plan.layout.accumulate, plan.layout.precision, plan.layout.activation_checkpointing) == (2, "fp16", True)
    assert plan.layout.options["reshard_after_forward"] == "never"
    assert by_formulas(plan).bytes == pytest.approx(plan.bytes, rel=0.06)
    assert plan.launched_with("auto", {"save_every": 100})["save_every"] == 100
    with pytest.raises(labkit.ScriptError, match="takes no parameter 'precison'; did you mean 'precision'"):
        labkit.plan("fsdp", nproc_per_node=2, precison="fp16")


def test_a_hugging_face_model_on_texts_of_any_length_is_planned_layer_by_layer():
    plan = labkit.plan(Script.load("fsdp", task="causal_lm"), nproc_per_node=2, device="2xT4", global_batch_size=16)

    assert plan.fits
    assert [unit.name for unit in plan.facts.units] == ["embed", *(f"blocks.{i}" for i in range(4)), "unembed"]
    assert by_formulas(plan).bytes == pytest.approx(plan.bytes, rel=0.02)
    for state in ("parameters", "optimizer"):
        assert by_formulas(plan).categories[state] == plan.peak.categories[state]
    longest = "samples differ in length: batches are planned at the longest of the first 64, with 126 positions"
    assert plan.problems == (longest,)
    assert {row.strategy for row in plan.advice.rows if row.fits} == COMPARED


def test_the_length_asked_for_is_planned_although_built_in_texts_are_short_and_it_is_said():
    script = Script.load("ddp", task="causal_lm")
    plan = labkit.plan(script, nproc_per_node=2, device="2xT4", global_batch_size=16, context=256)

    assert plan.facts.positions == 256
    assert "the longest of the first 64, with 256 positions" in plan.problems[0]
    assert "samples of 256 positions fit (now 8)" in str(plan)


@pytest.mark.soak
def test_stages_of_a_hugging_face_model_are_planned():
    script = Script.load("pipeline", task="causal_lm")
    plan = labkit.plan(script, nproc_per_node=2, device="2xT4", global_batch_size=16, accumulate=4)

    assert plan.fits
    assert by_formulas(plan).bytes == pytest.approx(plan.bytes, rel=0.03)


SKIPPING = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first, self.last = nn.Linear(28 * 28, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        down = self.layers[1](self.layers[0](self.first(x.flatten(1))))
        return self.last(self.layers[3](self.layers[2](down) + down))
"""


def test_a_model_whose_layers_are_no_chain_is_one_unit_and_its_rehearsal_counts():
    script = Script.load("fsdp").with_cells(model=SKIPPING, data=IMAGES)
    plan = labkit.plan(script, nproc_per_node=2, device="2xT4")

    assert [unit.name for unit in plan.facts.units] == ["model"]
    assert by_formulas(plan).categories["optimizer"] == plan.peak.categories["optimizer"]
    assert plan.fits
    assert plan.bytes == plan.advice.requested.peak.bytes
    assert "memory" in plan.figures()
    by_name = {row.strategy: row for row in plan.advice.rows}
    assert by_name["ddp"].fits
    assert by_name["pipeline"].remark.startswith("a pipeline needs embed, blocks, unembed or base_model_pp_plan")


@pytest.mark.soak
def test_selective_checkpointing_holds_what_is_between_all_and_nothing():
    some = labkit.plan("ddp", nproc_per_node=2, device="2xT4", global_batch_size=16, selective_checkpointing=True)
    every, none = (
        worst(some.facts, replace(some.layout, selective=False, activation_checkpointing=recomputed))[1]
        for recomputed in (False, True)
    )

    assert some.fits
    assert none.bytes < some.bytes < every.bytes


MIXTURE = """import torch
from torch import nn
from torch.nn import functional as F


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.router, self.norm = nn.Linear(width, experts), nn.LayerNorm(width)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x):
        flat = self.norm(x).flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            out.index_add_(0, token, expert(flat[token]) * weight[token, place, None])
        return x + out.view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 128)
        self.blocks = nn.ModuleList(Block(128, 4) for _ in range(4))
        self.unembed = nn.Linear(128, 256)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.unembed(x)
"""


def test_a_mixture_of_experts_is_planned_with_balanced_routing_and_says_so():
    plan = labkit.plan(Script.load("fsdp").with_cells(model=MIXTURE), nproc_per_node=2, global_batch_size=32)

    assert "each of 4 experts is assumed to get the same share of the tokens" in plan.problems
    assert any(each.startswith("if all tokens go to the same experts, a rank holds") for each in plan.problems)
    assert by_formulas(plan).bytes == pytest.approx(plan.bytes, rel=0.01)
    run = labkit.launch(plan, steps=3, trace_memory=True)
    assert run.memory().ranks[0].traced.bytes == pytest.approx(plan.bytes, rel=0.05)  # new routers choose nearly evenly


def test_a_model_that_fails_in_16_bits_is_planned_in_32():
    scatters = "out = self.unembed(self.blocks(self.embed(tokens)))\n        "
    scatters += "return torch.zeros(out.shape).scatter_add(-1, torch.zeros_like(out, dtype=torch.long), out)"
    scattering = (
        MODEL.replace(FORWARD, scatters).replace("self.unembed", "self.last").replace("def unembed", "def last")
    )
    facts = facts_of(DDP.with_cells(model=scattering), {})
    layout = layout_of(DDP, 2, {"precision": "bf16"})

    assert peak(facts, layout_of(DDP, 2, {})).bytes > 0
    with pytest.raises(UnknownToFormulas, match="without data, the model fails in bf16: RuntimeError: scatter"):
        peak(facts, layout)
    assert SpeedModel(DDP, facts, device_named("A100 80"), 2)(layout) is None
