"""Models that are not labkit's train the same under every strategy, in the planned memory, or a plan says why not.
benchmarks/foreign_models.py has all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import labkit
from labkit import LabError
from labkit.planner.model.rehearsal import rehearse

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from foreign_models import CLOSE, OPTIONS, SURE, difference, losses_of, script_of  # noqa: E402

STEPS = 3
HOW = {"steps": STEPS, "wait": True, **OPTIONS}


@pytest.mark.parametrize("model", ["multi_task", "tabular", "low_rank", "wide_buffers", "own_backward", "vq_vae"])
def test_models_of_others_train_the_same_in_the_planned_memory(model):
    expected = losses_of(labkit.launch(script_of(model, "single"), nproc_per_node=1, **HOW))
    for strategy in ("ddp", "fsdp"):
        plan = labkit.plan(script_of(model, strategy), nproc_per_node=2, **OPTIONS)
        run = labkit.launch(plan, steps=STEPS, wait=True)
        assert difference(losses_of(run), expected, range(1, STEPS + 1)) < CLOSE
        assert plan.bytes == pytest.approx(run.memory().ranks[plan.rank].traced.bytes, rel=SURE)
        assert not plan.problems


def test_what_fsdp_would_not_train_is_refused_by_plan_and_script():
    """It finds no tensor in a distribution, so it would reduce no gradient, and the optimizer would have none."""
    script = script_of("mixture_density", "fsdp")
    with pytest.raises(LabError, match="FSDP finds no tensor in the MixtureSameFamily that the model returns"):
        labkit.plan(script, nproc_per_node=2, **OPTIONS)
    with pytest.raises(labkit.RankFailedError, match="FSDP finds no tensor in the MixtureSameFamily"):
        labkit.launch(script, nproc_per_node=2, **HOW)


def test_copied_layers_are_planned_like_made_ones():
    """nn.TransformerEncoder copies its layer. Views of what is copied share its memory."""
    copied = script_of("prompts", "single")
    text = copied.cells["model"].text
    made = text.replace(
        "nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)", "nn.Sequential(*layers)"
    ).replace(
        "layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True)",
        "layers = [nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True) for _ in range(3)]",
    )
    assert "*layers" in made and "for _ in range(3)]" in made
    peaks = [rehearse(script, 1, OPTIONS).peak for script in (copied, copied.with_cells(model=made))]
    assert peaks[0].bytes == pytest.approx(peaks[1].bytes, rel=0.001)


def test_a_copied_batch_norm_is_planned():
    """Its count of batches is a constant, which torch cannot copy together with tensors that have no data."""
    text = script_of("batch_norm", "single").cells["model"].text
    copied = text.replace("*(Block(width) for _ in range(3))", "*(copy.deepcopy(block) for _ in range(3))")
    copied = "import copy\n\n" + copied.replace(
        "self.layers, self.head", "block = Block(width)\n        self.layers, self.head"
    )
    assert "copy.deepcopy(block)" in copied and "block = Block" in copied
    whole = [script_of("batch_norm", "single").with_cells(model=model) for model in (text, copied)]
    plans = [labkit.plan(script, nproc_per_node=1, **OPTIONS) for script in whole]
    assert plans[0].bytes == plans[1].bytes
    assert [plan.problems for plan in plans] == [(), ()]


def test_a_layer_that_is_used_several_times_is_resumed(tmp_path):
    """Its parameters have several names, of which torch saves one."""
    expected = losses_of(labkit.launch(script_of("albert", "single"), nproc_per_node=1, **HOW))
    kept = {**HOW, "nproc_per_node": 2, "checkpoint_dir": tmp_path}
    labkit.launch(script_of("albert", "fsdp"), **kept | {"steps": STEPS - 1})
    run = labkit.launch(script_of("albert", "ddp"), **kept)
    assert difference(losses_of(run), expected, range(STEPS, STEPS + 1)) < CLOSE
