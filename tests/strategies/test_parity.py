"""The proof of a strategy: from the same seed and global batch it trains the same model as one rank does."""

from __future__ import annotations

import functools
import json
import re

import pytest
from strategies.matrix import IMAGES, MATRIX, OPTIONS, Row, curve, curve_of, difference, edited, script

import labkit
from labkit import Script
from labkit.planner.model.rehearsal import rehearse


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What one rank trains, of each model once."""

    @functools.cache
    def made(model="transformer"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LABKIT_RUNS", str(tmp_path_factory.mktemp("reference")))
            return curve(script("single", model), 1)

    return made


def assert_the_same(row: Row, model: str, reference) -> None:
    if row.missing:
        pytest.skip(f"not in {row.missing}")
    what, expected = script(row.strategy, model), reference(model)
    run = labkit.launch(what, nproc_per_node=row.ranks, trace_memory=True, **OPTIONS | row.options)
    trained = curve_of(run, **row.options)
    assert difference(trained, expected) < 1e-9
    assert trained[1]["test_accuracy"] == expected[1]["test_accuracy"]
    if model != "mixture":  # its routers do not choose evenly
        assert_held_as_rehearsed(run, row, what)


def assert_held_as_rehearsed(run: labkit.Run, row: Row, what: Script) -> None:
    """A step on tensors without data, in one process, holds what the same step of the real ranks holds."""
    held = run.memory().ranks[-1]
    rehearsed = rehearse(what, row.ranks, OPTIONS | row.options, rank=held.rank).peak
    # 64 KiB: on a CPU the loader's batch in fp32 is held beside its copy in fp64
    assert held.traced.bytes == pytest.approx(rehearsed.bytes, rel=0.05, abs=2**16)
    for state in ("parameters", "optimizer"):
        assert held.traced.categories[state] == rehearsed.categories[state]


@pytest.mark.timeout(600)  # eight ranks on two cores
@pytest.mark.parametrize("row", [row for row in MATRIX if row.often], ids=str)
def test_every_strategy_trains_what_one_rank_trains(row, reference):
    assert_the_same(row, row.models[0], reference)


def test_activations_of_any_strides_are_sent_to_the_next_stage(reference):
    """Such as those of an image's patches, which are flattened and transposed."""
    embedded = "self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))"
    transposed = edited(script("pipeline"), {embedded: f"({embedded}).mT.contiguous().mT"})

    assert difference(curve(transposed, 2, accumulate=2), reference()) < 1e-9


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_in_single_precision_to_five_digits():
    """Under SGD. AdamW divides by the root of a second moment that starts near zero, which makes rounding grow."""

    def trained(row: Row):
        plain = script(row.strategy)
        plain = plain.with_cells(
            optimizer=plain.cells["optimizer"].text.replace("torch.optim.AdamW", "torch.optim.SGD")
        )
        return curve(plain, row.ranks, **row.options | {"precision": "fp32"})

    expected = trained(Row("single", 1))
    for row in (Row("zero1", 2), Row("fsdp", 2), Row("tensor_parallel", 2), Row("pipeline", 2, {"accumulate": 4})):
        assert difference(trained(row), expected) < 1e-5, row


@pytest.mark.soak
def test_how_samples_are_loaded_changes_nothing(reference):
    loaded = curve(script("ddp"), 2, workers=2, prefetch=1, pin_memory=True, deterministic=True)
    assert difference(loaded, reference()) < 1e-9


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("row", "model"), [(row, model) for row in MATRIX for model in row.models], ids=str)
def test_with_every_option_and_model_too(row, model, reference):
    assert_the_same(row, model, reference)


SHARED = ("precision", "clip_and_schedule", "accumulate")


@pytest.mark.parametrize(
    ("strategy", "before", "after"),
    [
        ("ddp", "return nullcontext() if last else model.no_sync()", "return model.no_sync()"),
        pytest.param("ddp", "/ count.clamp(min=1) * data.size()", "/ count.clamp(min=1)", marks=pytest.mark.soak),
        pytest.param("fsdp", "    dist.all_reduce(total)\n", "", marks=pytest.mark.soak),
    ],
    ids=["no all-reduce", "the mean of a sum's parts", "a norm of one rank"],
)
def test_a_broken_strategy_is_caught(strategy, before, after, reference):
    broken = edited(script(strategy, "transformer", *SHARED), {before: after})
    assert difference(curve(broken, 2, accumulate=2), reference()) > 1e-6


@pytest.mark.soak
def test_the_same_order_in_every_epoch_is_caught(reference):
    """With 160 samples, 24 steps of 16 are more than two epochs."""
    data = IMAGES.replace("randint(10, (1000,)", "randint(10, (200,)").replace("1000, 1", "200, 1")
    data = data.replace(":900", ":160").replace("900:", "160:")
    right = script("single", "MLP", *SHARED).with_cells(data=data)
    broken = edited(right, {"manual_seed(args.seed + epoch)": "manual_seed(args.seed)"})
    assert difference(curve(broken, 1), curve(right, 1)) > 1e-6


# Bytes per parameter byte that a rank of two holds: the blocks' parameters between forward and backward, all
# gradients and AdamW's two moments at the end of a step. ZeRO's table (arXiv 1910.02054, section 5).
HELD = [
    pytest.param("ddp", {}, 1, 1, 2, marks=pytest.mark.soak),
    pytest.param("zero1", {}, 1, 1, 1, marks=pytest.mark.soak),  # lab 04 measures this, and FSDP
    ("zero2", {"accumulate": 2}, 1, 0.5, 1),
    pytest.param("fsdp", {}, 0.5, 0.5, 1, marks=pytest.mark.soak),
    pytest.param("fsdp1", {}, 0.5, 0.5, 1, marks=pytest.mark.soak),
    pytest.param("fsdp", {"reshard_after_forward": "never"}, 1, 0.5, 1, marks=pytest.mark.soak),
    pytest.param("fsdp1", {"sharding_strategy": "SHARD_GRAD_OP"}, 1, 0.5, 1, marks=pytest.mark.soak),
    pytest.param("fsdp1", {"sharding_strategy": "NO_SHARD"}, 1, 1, 2, marks=pytest.mark.soak),
]
MEASURE = """
def share_held(tensors, whole):
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if t is not None]
    return sum(t.numel() for t in local if t.untyped_storage().size()) / whole


"""


def extras_of(name, options):
    return ["fsdp_options"] if name == "fsdp" and options else []


@pytest.mark.parametrize(("name", "options", "parameters", "gradients", "moments"), HELD)
def test_a_rank_holds_what_zero_says(name, options, parameters, gradients, moments):
    """Counted inside the ranks, from the tensors themselves."""
    counting = edited(
        script(name, "transformer", "accumulate", *extras_of(name, options)),
        {
            "# %% step\n": f"# %% step\n{MEASURE}",
            "            loss.backward()\n": """
            blocks = [p for name, p in model.named_parameters() if "blocks" in name]
            print("held", share_held(blocks, model.wholes[0]), flush=True)
            loss.backward()
""",
            "    model = parallelize(model.train(), mesh, device, args)\n": """
    wholes = [sum(p.numel() for p in model.blocks.parameters()), sum(p.numel() for p in model.parameters())]
    model = parallelize(model.train(), mesh, device, args)
    model.wholes = wholes
""",
            "    optimizer.zero_grad()\n": """
    state = getattr(optimizer, "optim", optimizer).state.values()
    print("held", share_held([p.grad for p in model.parameters()], model.wholes[1]), flush=True)
    print("held", share_held([s[k] for s in state for k in ("exp_avg", "exp_avg_sq")], model.wholes[1]), flush=True)
    optimizer.zero_grad()
""",
        },
    )
    run = labkit.launch(counting, nproc_per_node=2, steps=2, global_batch_size=4, **options)
    micro_batches = options.get("accumulate", 1)
    for rank in range(2):
        shares = [json.loads(found) for found in re.findall(r"^held (.+)$", run.logs(rank=rank), re.MULTILINE)]
        *forward, held_gradients, held_moments = shares[-2 - micro_batches :]
        assert forward == pytest.approx([parameters] * micro_batches, rel=0.05)
        assert held_gradients == pytest.approx(gradients, rel=0.05)
        assert held_moments == pytest.approx(moments, rel=0.05)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    """fp16's loss scale under a pipeline, where no rank sees another's gradients; on the CPU, where it is refused."""
    overflowing = edited(
        script("pipeline", "transformer", "precision"),
        {
            'if args.precision == "fp16" and device.type != "cuda":': "if False:",
            "    scaler.step(optimizer)\n": """
    if step == 1 and dist.get_rank() == 1:
        next(model.parameters()).grad.view(-1)[0] = float("inf")
    scaler.step(optimizer)
""",
            "    scaler.update()\n": """
    scaler.update()
    print("scale", scaler.get_scale(), flush=True)
""",
        },
    )
    options = {"steps": 3, "global_batch_size": 4, "accumulate": 2, "precision": "fp16"}
    run = labkit.launch(overflowing, nproc_per_node=2, **options)
    for rank in range(2):
        scales = re.findall(r"^scale (.+)$", run.logs(rank=rank), re.MULTILINE)
        assert scales == ["65536.0", "32768.0", "32768.0"]
