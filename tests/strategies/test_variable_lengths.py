"""The gradient is that of the mean over all predictions of the global batch, however their lengths and ranks differ.

On padded dict batches of transformers' models, with labels of -100: sums and counts, never means of means.
"""

from __future__ import annotations

import functools

import pytest
from strategies.matrix import OPTIONS, curve, difference, edited

import labkit
from labkit import Script

SHORT = OPTIONS | {"steps": 24, "global_batch_size": 8}
# transformers' RMSNorm computes in fp32, which hides the last digits; GPT-2 and BERT compute in fp64 throughout
GPT2 = """
from transformers import AutoConfig, AutoModelForCausalLM


def Model():
    sizes = {"vocab_size": 256, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes, **off))
"""
SILENCED = """


collate_all = collate


def collate(samples):
    batch = collate_all(samples)
    return batch if len(samples) < 4 else batch | {"labels": -100 + 0 * batch["labels"]}
"""
ROWS = [
    ("ddp", 2, {"accumulate": 4}, True),
    ("fsdp", 2, {"accumulate": 2}, True),
    ("pipeline", 2, {"accumulate": 4, "schedule": "1F1B"}, False),
    ("ddp", 2, {}, False),
    ("zero1", 2, {"accumulate": 2}, False),
    ("zero2", 2, {"accumulate": 4}, False),
    ("fsdp1", 2, {"accumulate": 2}, False),
    ("tensor_parallel", 2, {"accumulate": 2}, False),
    ("pipeline", 2, {"accumulate": 4, "schedule": "ZBVZeroBubble"}, False),
    ("hybrid", 4, {"tensor": 2, "accumulate": 2}, False),
    ("hybrid", 8, {"tensor": 2, "pipeline": 2, "accumulate": 2}, False),
]


def script(strategy: str, model: str = "qwen3", *extras: str) -> Script:
    """The task as it is, with another model, or without dropout, which differs between ranks."""
    if model == "bert":
        composed = Script.load(strategy, *extras, task="sequence_classifier")
        text = composed.cells["configuration"].text.replace(
            '"num_attention_heads": 4}',
            '"num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}',
        )
        assert text != composed.cells["configuration"].text
        return composed.with_cells(configuration=text)
    composed = Script.load(strategy, *extras, task="causal_lm")
    return composed.with_cells(model=GPT2) if model == "gpt2" else composed


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What one rank trains in one piece."""

    @functools.cache
    def made(model):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LABKIT_RUNS", str(tmp_path_factory.mktemp("reference")))
            return curve(script("single", model), 1, **SHORT)

    return made


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("strategy", "ranks", "options"),
    [
        pytest.param(*row, marks=[] if often else pytest.mark.soak, id="-".join(map(str, (*row[:2], *row[2].values()))))
        for *row, often in ROWS
    ],
)
def test_padded_batches_train_what_one_rank_trains(strategy, ranks, options, reference):
    assert difference(curve(script(strategy), ranks, **SHORT | options), reference("qwen3")) < 1e-9


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("gpt2", "fsdp"),
        pytest.param("gpt2", "ddp", marks=pytest.mark.soak),
        pytest.param("bert", "ddp", marks=pytest.mark.soak),
        pytest.param("bert", "fsdp", marks=pytest.mark.soak),
    ],
)
def test_tied_weights_and_outputs_of_other_models_too(model, strategy, reference):
    assert difference(curve(script(strategy, model), 2, **SHORT, accumulate=2), reference(model)) < 1e-9


@pytest.mark.soak
def test_a_mean_of_each_rank_s_mean_is_caught(reference):
    """As most training loops have it."""
    own = edited(
        script("ddp", "qwen3", "precision", "clip_and_schedule"),
        {
            "    counted.wait()  # the ranks' counts were added up during the forward pass\n": (
                "    counted.wait()\n    count = count_of(batch) * data.size()\n"
            ),
        },
    )
    assert difference(curve(own, 2, **SHORT), reference("qwen3")) > 1e-4


def test_a_rank_without_a_single_prediction_adds_nothing():
    """All labels of one rank's first batch are -100: no NaN, and the loss is that of the others."""
    composed = script("ddp")
    data = composed.cells["data"].text.rstrip() + SILENCED
    run = labkit.launch(composed.with_cells(data=data), nproc_per_node=2, steps=3, global_batch_size=8)
    assert (run.metrics()["loss"].dropna() == 0).all()
