"""Formulas against the rehearsed step: two ways to the same bytes. benchmarks/memory_accuracy.py has many more rows."""

import functools

import pytest
import torch
from strategies.matrix import CNN, IMAGES, MLP
from textbook import block_activations

from labkit import LabError, Script
from labkit.planner.contract import able_to
from labkit.planner.layout import layout_of
from labkit.planner.memory.peak import moments, peak
from labkit.planner.model.facts import Variant, facts_of
from labkit.planner.model.fake.cuda_kernels import cuda_lists
from labkit.planner.model.rehearsal import rehearse, states_alone
from labkit.version import release_of

WIDE = MLP.replace("width=64, layers=4", "width=512, layers=4")
# Both ends of a ReLU keep the same tensor: its backward and the next block.
RESIDUAL = """import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, into, out):
        super().__init__()
        self.up, self.down, self.beside = nn.Linear(into, 256), nn.Linear(256, out), nn.Linear(into, out)

    def forward(self, x):
        return torch.relu(self.down(torch.relu(self.up(x))) + self.beside(x))


class Model(nn.Module):
    def __init__(self, widths=(64, 64, 64, 64, 64)):
        super().__init__()
        self.embed = nn.Embedding(256, widths[0])
        self.blocks = nn.ModuleList(Block(*pair) for pair in zip(widths, widths[1:]))
        self.unembed = nn.Sequential(nn.Linear(widths[-1], 256), nn.ReLU())

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.unembed(x)
"""
NARROWING = RESIDUAL.replace("64, 64, 64, 64, 64", "64, 64, 32, 32, 16").replace("embed", "first")
MODELS = {"CNN": CNN, "MLP": WIDE, "residual": RESIDUAL, "narrowing": NARROWING}


def script(strategy, model):
    script = Script.load(strategy, task="mixture" if model == "mixture" else "bytes")
    if model in ("transformer", "mixture"):
        return script
    return script.with_cells(model=MODELS[model], **({"data": IMAGES} if model in ("CNN", "MLP") else {}))


@functools.cache
def facts(model, split=()):
    return facts_of(script("tensor_parallel" if split else "single", model), {}, split)


TORCH = release_of(torch.__version__)
ROWS = [
    ("single", 1, "transformer", {"precision": "bf16", "activation_checkpointing": True}, 0.001),
    ("single", 1, "CNN", {"accumulate": 2}, 0.001),
    ("ddp", 2, "MLP", {"gradient_as_bucket_view": False, "accumulate": 4}, 0.02),
    ("zero1", 4, "MLP", {}, 0.02),
    ("zero2", 4, "MLP", {"global_batch_size": 4}, 0.001),
    ("fsdp", 4, "MLP", {"precision": "bf16"}, 0.06),
    ("fsdp", 2, "transformer", {"reshard_after_forward": "always", "activation_checkpointing": True}, 0.06),
    ("tensor_parallel", 2, "transformer", {"sequence_parallel": True}, 0.06),
    ("pipeline", 2, "transformer", {"accumulate": 4, "schedule": "1F1B"}, 0.001),
    ("pipeline", 2, "residual", {"accumulate": 4, "schedule": "1F1B"}, 0.001),
    ("pipeline", 2, "residual", {"accumulate": 4, "schedule": "Interleaved1F1B"}, 0.001),
    ("hybrid", 4, "transformer", {"tensor": 2}, 0.06),
    ("context_parallel", 4, "transformer", {}, 0.06),
    ("context_parallel", 4, "transformer", {"context_ranks": 2, "accumulate": 2}, 0.06),
    ("context_parallel", 4, "transformer", {"activation_checkpointing": True}, 0.06),
    ("expert_parallel", 4, "mixture", {}, 0.06),
    ("expert_parallel", 4, "mixture", {"expert_ranks": 2, "precision": "bf16"}, 0.06),
    ("expert_parallel", 4, "mixture", {"activation_checkpointing": True, "accumulate": 2}, 0.1),
    ("ddp", 2, "residual", {}, 0.001),
    ("fsdp", 2, "narrowing", {}, 0.001),
]


@pytest.mark.parametrize(("strategy", "ranks", "model", "options", "tolerance"), ROWS, ids=str)
def test_the_formulas_agree_with_the_rehearsal(strategy, ranks, model, options, tolerance):
    if strategy == "pipeline" and TORCH < (2, 13):  # whose stages free other tensors, and earlier or later
        tolerance = 0.06
    what, options = script(strategy, model), {"global_batch_size": 16, **options}
    layout = layout_of(what, ranks, options)
    split = ((layout.tensor, layout.options.get("sequence_parallel", False)),) if layout.tensor > 1 else ()
    planned, seen = peak(facts(model, split), layout), rehearse(what, ranks, options).peak
    assert planned.bytes == pytest.approx(seen.bytes, rel=tolerance)
    if tolerance == 0.001:
        assert planned.phase == seen.phase
    for state in ("parameters", "optimizer"):
        assert planned.categories[state] == seen.categories[state]


def test_context_ranks_gather_keys_and_values_of_grouped_heads_as_they_are():
    plain = "scaled_dot_product_attention(q, k, v, is_causal=True)"
    grouped = "scaled_dot_product_attention(q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True)"
    what = script("context_parallel", "transformer")
    what = what.with_cells(model=what.cells["model"].text.replace(plain, grouped))
    layout, counted = layout_of(what, 4, {"global_batch_size": 16}), facts_of(what, {})

    assert counted.keys * 4 == 2 * counted.units[1].output  # one of 4 heads
    seen = rehearse(what, 4, {"global_batch_size": 16}).peak
    assert peak(counted, layout).bytes == pytest.approx(seen.bytes, rel=0.06)


@pytest.mark.parametrize(
    ("strategy", "model", "together"),
    [
        ("single", "MLP", True),
        ("zero1", "MLP", True),
        ("fsdp", "MLP", True),
        ("tensor_parallel", "transformer", False),
        ("expert_parallel", "mixture", False),
    ],
)
def test_an_optimizer_is_planned_as_torch_runs_it_on_a_gpu(strategy, model, together):
    """All parameters of one mesh together: AdamW's temporaries are as large as the parameters that a rank updates."""
    ranks, options = 1 if strategy == "single" else 2, {"global_batch_size": 2 if model == "MLP" else 16}
    what = script(strategy, model)
    layout, counted = layout_of(what, ranks, options), facts(model, ((2, False),) if model == "transformer" else ())
    planned = {on_gpu: moments(counted, layout, on_gpu=on_gpu)[-1] for on_gpu in (False, True)}
    assert (planned[True].bytes != planned[False].bytes) == together

    seen = rehearse(what, ranks, options, capability=(8, 0)).peak
    assert peak(counted, layout, on_gpu=True).bytes == pytest.approx(seen.bytes, rel=0.06)
    if strategy == "single":
        assert seen.phase == "optimizer"
        assert seen.bytes == pytest.approx(planned[True].bytes, rel=0.001)


@pytest.mark.parametrize(
    ("strategy", "options", "sets"),
    [
        ("ddp", {}, 1),
        ("zero1", {}, 1),
        ("ddp", {"find_unused_parameters": True}, 0),
        ("ddp", {"find_unused_parameters": True, "static_graph": True}, 1),
        ("fsdp", {}, 0),
    ],
)
def test_the_buckets_that_ddp_replaces_are_planned_on_a_gpu_until_the_optimizers_step(strategy, options, sets):
    """NCCL may still hold those of the first step while the second computes."""
    what, options = script(strategy, "transformer"), {"global_batch_size": 16} | options
    layout, counted = layout_of(able_to(what, options), 2, options), facts("transformer")
    here, there = peak(counted, layout), peak(counted, layout, on_gpu=True)
    gradients = sum(4 * n for unit in counted.units for n in unit.parameters)

    assert there.phase == "backward"
    assert there.bytes - here.bytes == sets * gradients
    assert moments(counted, layout)[-1].categories.get("communication", 0) == 0
    assert rehearse(what, 2, options, capability=(8, 0)).peak.bytes == pytest.approx(there.bytes, rel=0.001)


def test_autocasts_lists_are_read_from_this_torch():
    """torch has kernels for CUDA's autocast in every build: all of them are on the lists, and nothing else is."""
    kernels = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    registered = {name.removeprefix("aten::") for name in kernels if name.startswith("aten::")}
    listed = {name for names in cuda_lists().values() for name in names}
    assert registered - listed == {"binary_cross_entropy", "cudnn_convolution", "cudnn_convolution_transpose"}
    assert listed <= registered


def test_a_loss_that_cudas_autocast_refuses_is_refused_in_the_plan():
    model = RESIDUAL.replace("return self.unembed(x)", "return F.binary_cross_entropy(x.sigmoid(), x.sigmoid())")
    what = Script.load("ddp", "precision").with_cells(
        model=model.replace("import nn\n", "import nn\nfrom torch.nn import functional as F\n")
    )
    with pytest.raises(LabError, match="binary_cross_entropy_with_logits"):
        rehearse(what, 1, {"precision": "bf16", "global_batch_size": 4}, capability=(8, 0))


@pytest.mark.parametrize(
    ("on_cuda", "on_any"),
    [
        ("x.cuda()", "x"),
        ("x * torch.ones(64, device='cuda')", "x * torch.ones(64)"),
        ("x * torch.tensor([2.0] * 64, device='cuda')", "x * torch.tensor([2.0] * 64)"),
        ("x * torch.ones(64).to('cuda:0')", "x * torch.ones(64)"),
        ("x.to(0, non_blocking=True)", "x"),
        (
            "torch.autocast('cuda', enabled=False)(torch.relu)(x @ x.mT)",
            "torch.autocast('cpu', enabled=False)(torch.relu)(x @ x.mT)",
        ),
        ("x.float() if torch.is_autocast_enabled() else x", "x.float()"),
    ],
)
def test_what_a_model_says_of_cuda_is_said_of_the_gpu_that_is_planned_for(on_cuda, on_any):
    def planned(expression):
        model = RESIDUAL.replace(
            "        return self.unembed(x)", f"        x = x + ({expression}).mean()\n        return self.unembed(x)"
        )
        what = Script.load("ddp", "precision").with_cells(model=model)
        return rehearse(what, 1, {"precision": "bf16", "global_batch_size": 4}, capability=(8, 0)).peak

    assert planned(on_cuda) == planned(on_any)


def test_mixed_types_that_cuda_promotes_are_planned_in_16_bits():
    model = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed, self.message = nn.Embedding(256, width), nn.Linear(width, width)
        self.unembed = nn.Linear(width, 256)

    def forward(self, x):
        h = self.embed(x)  # in 32 bits, messages in 16
        return self.unembed(torch.zeros_like(h).scatter_add(1, x[..., None].expand_as(h) % h.shape[1], self.message(h)))
"""
    what = Script.load("ddp").with_cells(model=model)
    assert rehearse(what, 1, {"precision": "fp16", "global_batch_size": 4}, capability=(8, 0)).peak.bytes


def test_ddp_has_no_bucket_for_a_sparse_gradient_and_holds_only_its_rows():
    rows, samples = 100_000, 16
    sgd = "import torch\n\n\ndef optimizer_of(parameters, args):\n    return torch.optim.SGD(parameters, lr=args.lr)\n"
    dense = RESIDUAL.replace("nn.Embedding(256, widths[0])", f"nn.Embedding({rows}, widths[0])")
    sparse = dense.replace("widths[0])", "widths[0], sparse=True)", 1)

    def held(model):
        composed = Script.load("ddp").with_cells(model=model, optimizer=sgd)
        return rehearse(composed, 2, {"global_batch_size": samples}).peak.categories

    assert held(dense)["gradients"] - held(sparse)["gradients"] == 4 * 64 * rows


def test_the_last_stage_holds_what_its_loss_keeps_once():
    what, options = script("pipeline", "residual"), {"global_batch_size": 16, "accumulate": 4, "schedule": "GPipe"}
    planned = peak(facts("residual"), layout_of(what, 2, options), 1)
    assert planned.bytes == pytest.approx(rehearse(what, 2, options, rank=1).peak.bytes, rel=0.001)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_lora_freezes_is_counted_once_and_in_the_type_in_which_it_is_kept(strategy, precision):
    pytest.importorskip("peft")
    what = Script.load(strategy, "precision", "lora")
    options = {"global_batch_size": 16, "lora_rank": 8, "precision": precision}
    agrees(what, options)


HEAD_ONLY = "self.requires_grad_(False); self.unembed.requires_grad_(True)"


@pytest.mark.parametrize(
    ("strategy", "options", "freezing"),
    [
        ("ddp", {"precision": "bf16"}, "self.blocks[1:].requires_grad_(False)"),
        ("fsdp", {"precision": "bf16"}, "self.blocks[1:].requires_grad_(False)"),
        ("fsdp", {"accumulate": 4}, "self.blocks[1:].requires_grad_(False)"),
        ("fsdp", {"reshard_after_forward": "always"}, "self.blocks[1:].requires_grad_(False)"),
        ("ddp", {}, HEAD_ONLY),
        ("zero2", {}, HEAD_ONLY),
        ("fsdp", {"precision": "bf16"}, HEAD_ONLY),
        ("fsdp", {}, "self.embed.requires_grad_(False); self.blocks[:-1].requires_grad_(False)"),
        (
            "ddp",
            {"precision": "bf16"},
            "self.embed.requires_grad_(False); self.blocks[1:].to(torch.bfloat16).requires_grad_(False)",
        ),
    ],
)
def test_what_a_model_freezes_is_gathered_and_keeps_no_activations_below_what_is_trained(strategy, options, freezing):
    made = "nn.Sequential(nn.Linear(widths[-1], 256), nn.ReLU())"
    assert made in RESIDUAL
    frozen = RESIDUAL.replace(made, f"{made}\n        {freezing}")
    frozen = frozen.replace("64, 64, 64, 64, 64", "512, 512, 512, 512, 512")
    agrees(Script.load(strategy).with_cells(model=frozen), {"global_batch_size": 8, **options})


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_states_alone_divide_what_is_frozen_and_count_it_in_the_type_in_which_it_is_kept(strategy):
    pytest.importorskip("peft")
    what, options = Script.load(strategy, "precision", "lora"), {"precision": "bf16", "global_batch_size": 16}
    alone, seen = states_alone(what, layout_of(what, 2, options), options), rehearse(what, 2, options).peak
    assert alone["parameters"] == seen.categories["parameters"]


def agrees(what, options):
    layout = layout_of(able_to(what, options), 2, options)
    precisions = ["16" if options.get("precision") == "bf16" else "fp32"]
    planned = peak(facts_of(what, options, precisions=precisions, recomputed=False), layout)
    seen = rehearse(what, 2, options).peak
    assert planned.bytes == pytest.approx(seen.bytes, rel=0.02)
    assert planned.categories["parameters"] == pytest.approx(seen.categories["parameters"], rel=0.001)


def test_a_block_keeps_what_the_paper_says():
    counted = facts("transformer").profiles
    for variant, kept in [(Variant(), "everything"), (Variant(recomputed=True), "input")]:
        assert counted[variant][1].saved.at(3) == block_activations(3, 128, 128, 4, kept=kept)


def test_flops_of_a_block_are_those_of_its_matrix_products():
    block, tokens, width = facts("transformer").units[1], 128, 128
    assert block.flops == 2 * tokens * 12 * width**2 + 4 * tokens**2 * width
