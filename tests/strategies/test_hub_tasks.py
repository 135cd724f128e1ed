"""Every task for models of a hub trains under other strategies what one rank trains, in fp64 on random lengths."""

from __future__ import annotations

import pytest
from strategies.matrix import OPTIONS, curve, difference

from labkit import Script

# transformers' RMSNorm computes in fp32, and 24 steps make 1e-4 of its last digit.
NORMS = """
import torch
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.t5 import modeling_t5


def in_their_type(self, x):
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


"""
PATCH = """def Model():
    modeling_qwen3.Qwen3RMSNorm.forward = modeling_t5.T5LayerNorm.forward = in_their_type
"""
HEADS = '"num_attention_heads": 4}'
SHORT = OPTIONS | {"global_batch_size": 8}
ROWS = [
    ("causal_lm", "fsdp", 2, {"pack": True, "accumulate": 2}, True),
    ("causal_lm", "tensor_parallel", 2, {"pack": True}, False),
    ("causal_lm", "pipeline", 2, {"pack": True, "accumulate": 2}, False),
    ("causal_lm", "hybrid", 4, {"pack": True, "tensor": 2}, False),
    ("sequence_classifier", "fsdp", 2, {"accumulate": 2}, False),
    ("seq2seq", "fsdp", 2, {"accumulate": 2}, True),
    ("seq2seq", "ddp", 4, {}, False),
    ("seq2seq", "zero1", 2, {}, False),
    ("image_text", "ddp", 2, {}, True),
    ("image_text", "fsdp", 4, {}, False),
    ("image_text", "zero2", 2, {}, False),
]


def script(task: str, strategy: str) -> Script:
    composed = Script.load(strategy, task=task)
    if task in ("causal_lm", "seq2seq"):
        model = composed.cells["model"].text
        return composed.with_cells(model=NORMS + model.replace("def Model():\n", PATCH))
    if task != "sequence_classifier":
        return composed
    text = composed.cells["configuration"].text
    assert text.count(HEADS) == 1
    dropout = '"num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}'
    return composed.with_cells(configuration=text.replace(HEADS, dropout))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What one rank trains in one piece."""
    curves = {}

    def made(task, options):
        key = (task, "pack" in options)
        if key not in curves:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("LABKIT_RUNS", str(tmp_path_factory.mktemp("reference")))
                packed = {name: value for name, value in options.items() if name == "pack"}
                curves[key] = curve(script(task, "single"), 1, **SHORT, **packed)
        return curves[key]

    return made


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("task", "strategy", "ranks", "options"),
    [
        pytest.param(*row, marks=[] if often else pytest.mark.soak, id="-".join(map(str, row[:3])))
        for *row, often in ROWS
    ],
)
def test_a_task_trains_what_one_rank_trains(task, strategy, ranks, options, reference):
    (steps, tests), (expected, expected_tests) = (
        curve(script(task, strategy), ranks, **SHORT | options),
        reference(task, options),
    )
    if task == "image_text":  # an evaluation compares each rank's batch by itself
        tests = expected_tests
    assert difference((steps, tests), (expected, expected_tests)) < 1e-9
