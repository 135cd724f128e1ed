"""What a strategy cannot do it says in one sentence, the same on every rank, before any of them can hang."""

from __future__ import annotations

import pytest
from strategies.matrix import CNN, IMAGES, MLP, script

import labkit
from labkit import Script

rarely = pytest.mark.soak


@pytest.mark.parametrize(
    ("what", "ranks", "options", "sentence"),
    [
        pytest.param("single", 2, {}, "this script trains on one rank, not on 2: use ddp or fsdp", marks=rarely),
        pytest.param(
            "context_parallel", 4, {"context_ranks": 3}, "--context-ranks 3 must divide the 4 ranks", marks=rarely
        ),
        ("context_parallel", 3, {}, "128 positions cannot be split into 2 chunks for each of 3 context ranks"),
        ("tensor_parallel", 5, {}, "96 features of qkv cannot be split across 5 tensor ranks"),
        pytest.param("pipeline", 3, {}, "4 blocks cannot be split into 3 pipeline stages", marks=rarely),
        (
            "pipeline",
            2,
            {"schedule": "1F1B"},
            "--schedule 1F1B on 2 pipeline ranks needs at least 2 micro-batches; --accumulate is 1",
        ),
        pytest.param(
            "hybrid",
            2,
            {"tensor": 2, "pipeline": 2},
            "2 ranks cannot be split into --pipeline 2 x --tensor 2",
            marks=rarely,
        ),
        pytest.param(
            "pipeline", 4, {"schedule": "LoopedBFS"}, "4 blocks cannot be split into 8 pipeline stages", marks=rarely
        ),
        pytest.param(
            "pipeline",
            2,
            {"schedule": "InterleavedZeroBubble", "accumulate": 2, "compile": True},
            "--schedule InterleavedZeroBubble runs backward in two parts, which --compile does not allow",
            marks=rarely,
        ),
        pytest.param("fsdp", 2, {"replicas": 3}, "--replicas 3 must divide the 2 ranks", marks=rarely),
        pytest.param(
            "ddp",
            2,
            {"sync_batch_norm": True},
            "--sync-batch-norm needs GPUs: torch's SyncBatchNorm does not run on the CPU",
            marks=rarely,
        ),
        pytest.param(
            "ddp",
            2,
            {"compress": "bf16"},
            "--compress bf16 needs NCCL, which sums bf16: use fp16",
            marks=rarely,
        ),
        pytest.param(
            "ddp",
            2,
            {"compress": "powersgd", "precision": "fp16"},
            "--compress powersgd never recovers from an overflow of fp16: use another --compress",
            marks=rarely,
        ),
        pytest.param("diloco", 2, {"sync_every": 0}, "--sync-every 0 must be at least 1", marks=rarely),
        pytest.param(
            "ddp",
            2,
            {"static_graph": True, "accumulate": 2},
            "--static-graph does not work with --accumulate: torch aborts on no_sync; leave one out",
            marks=rarely,
        ),
        pytest.param(
            "fsdp1",
            2,
            {"cpu_offload": True},
            "--cpu-offload of FullyShardedDataParallel needs a GPU; fsdp's runs on the CPU too",
            marks=rarely,
        ),
        pytest.param(
            "zero2", 2, {"precision": "fp16"}, "--precision fp16 needs a GPU; use fp32 or bf16 on the CPU", marks=rarely
        ),
    ],
)
def test_what_does_not_fit_is_refused(what, ranks, options, sentence):
    refused(script(what), ranks, {"global_batch_size": 12, **options}, sentence)


LOOSE = MLP.replace("        self.last = ", "        self.scale = nn.Parameter(torch.ones(1))\n        self.last = ")
TIED = MLP.replace("        self.last = ", "        self.blocks[3] = self.blocks[0]\n        self.last = ")

NO_POSITIONS = "context parallelism must tell the model where its positions are: Model has no layer positions"


@pytest.mark.parametrize(
    ("what", "model", "sentence"),
    [
        ("pipeline", CNN, "a pipeline needs repeated layers: name a list of them Model.blocks"),
        ("tensor_parallel", MLP, "Sequential has no qkv, out, up, down to split: write another TENSOR_PLAN"),
        pytest.param("context_parallel", MLP, NO_POSITIONS, marks=rarely),
        pytest.param("context_parallel", CNN, NO_POSITIONS, marks=rarely),
        pytest.param(
            "tensor_parallel",
            CNN,
            "tensor parallelism needs repeated layers: name a list of them Model.blocks",
            marks=rarely,
        ),
        pytest.param(
            "pipeline",
            LOOSE,
            "a pipeline cannot place parameters of the model itself: put them into a submodule",
            marks=rarely,
        ),
        pytest.param(
            "pipeline", TIED, "a pipeline cannot share weights between stages: untie this model's", marks=rarely
        ),
    ],
)
def test_the_message_names_what_a_model_lacks_to_be_split(what, model, sentence):
    refused(Script.load(what).with_cells(model=model, data=IMAGES), 2, {}, sentence)


def test_a_sequence_that_does_not_split_is_refused():
    text = script("tensor_parallel").cells["data"].text.replace("data_dir, context=128", "data_dir, context=127")
    options = {"sequence_parallel": True, "global_batch_size": 4}
    refused(
        script("tensor_parallel").with_cells(data=text),
        2,
        options,
        "--sequence-parallel: 127 positions cannot be split across 2 tensor ranks",
    )


SHIFTED = {
    "return (batch[1] != -100).sum()": "return (batch[1][:, 1:] != -100).sum()",
    "logits.flatten(0, -2), batch[1].flatten()": "logits[:, :-1].flatten(0, -2), batch[1][:, 1:].flatten()",
}


@pytest.mark.parametrize(
    ("title", "edits", "sentence"),
    [
        ("task", SHIFTED, "a batch has 508 predictions, its parts 504: context parallelism needs labels that are"),
        pytest.param(
            "model",
            {
                "F.scaled_dot_product_attention(q, k, v, is_causal=True)": "(q @ k.mT).softmax(-1) @ v",
            },
            "does not call F.scaled_dot_product_attention: its ranks would not see one another's positions",
            marks=rarely,
        ),
        pytest.param("model", {", is_causal=True": ""}, "needs scaled_dot_product_attention(q, k, v, is", marks=rarely),
    ],
)
def test_a_model_or_task_that_context_ranks_cannot_split_is_refused(title, edits, sentence):
    text = script("context_parallel").cells[title].text
    for before, after in edits.items():
        assert before in text
        text = text.replace(before, after)
    refused(script("context_parallel").with_cells(**{title: text}), 2, {"global_batch_size": 4}, sentence)


MEAN = """def metrics_of(outputs, batch):
    return {"acc": (outputs.argmax(-1) == batch[1]).float().mean()}
"""
EACH = "def count_of(batch):\n    return batch[1] != -100\n"
DICT = "def predictions_of(outputs, batch):\n    return {'predicted': outputs.argmax(-1), 'labels': batch[1]}\n"


@pytest.mark.parametrize(
    ("what", "cells", "sentence"),
    [
        (script("ddp"), {"metrics_of": MEAN}, "they returned {'acc': tensor(0."),
        pytest.param(script("context_parallel"), {"metrics_of": MEAN}, "they returned {'acc': ", marks=rarely),
        pytest.param(script("pipeline"), {"metrics_of": MEAN}, "they returned {'acc': tensor(0.", marks=rarely),
        pytest.param(
            script("ddp"),
            {"count_of": EACH},
            "and count_of a number; they returned {'accuracy': (tensor(",
            marks=rarely,
        ),
        (
            Script.load("ddp", "gather_metrics", task="digits"),
            {"predictions_of": DICT},
            "predictions_of returned {'predicted': ",
        ),
    ],
)
def test_a_task_that_cannot_be_evaluated_is_refused_at_the_first_evaluation(what, cells, sentence):
    refused(what.with_cells(**cells), 2, {"global_batch_size": 4, "steps": 2}, sentence)


def test_data_that_is_not_there_is_named(tmp_path):
    refused(script("ddp"), 2, {"data_dir": tmp_path}, f"{tmp_path} has 0 bytes of *.txt; at least 2560 are needed")


def test_the_message_names_parts_of_another_stage():
    early = MLP.replace("        self.blocks", "        self.last = nn.Linear(width, 10)\n        self.blocks", 1)
    early = early.replace("        self.last = nn.Linear(width, 10)\n\n", "\n")
    sentence = "'Model' object has no attribute 'last': the first stage has what precedes blocks, the last what follows"
    with pytest.raises(labkit.RankFailedError, match=sentence):
        labkit.launch(Script.load("pipeline").with_cells(model=early, data=IMAGES), nproc_per_node=2)


def refused(what, ranks, options, sentence):
    with pytest.raises(labkit.RankFailedError) as raised:
        labkit.launch(what, nproc_per_node=ranks, **options)
    assert sentence in str(raised.value)
    said = [labkit.attach("latest").logs(rank=rank) for rank in range(ranks)]
    assert "Traceback" not in "".join(said)
    # torchrun ends the other ranks as soon as one has failed, some before they come to speak
    assert {text.count(sentence) for text in said} <= {0, 1}
