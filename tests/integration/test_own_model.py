"""Somebody's own model, pictures and optimizer, under labkit's scripts."""

from __future__ import annotations

import numpy
import pytest
import torch
from PIL import Image
from scripts.resnet import make_resnet, sgd

import labkit
from labkit import Script


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Three classes of 32 x 32 pictures, each mostly of one colour, as folders of PNG files."""
    folder, random = tmp_path_factory.mktemp("pictures"), numpy.random.default_rng(0)
    for part, count in (("train", 40), ("test", 8)):
        for channel, name in enumerate(("red", "green", "blue")):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 160, (32, 32, 3), dtype=numpy.uint8)
                pixels[..., channel] = random.integers(120, 255)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")
    return folder


@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 1), ("fsdp", 0)])
def test_a_resnet_with_batch_norm_trains_on_folders_of_pictures(strategy, workers, pictures, tmp_path, capsys):
    script = Script.load(strategy, "validate", "checkpoints", task="images").with_cells(
        model=make_resnet, optimizer=sgd
    )

    run = labkit.launch(
        script,
        nproc_per_node=2,
        data_dir=pictures,
        global_batch_size=12,
        steps=40,
        lr=0.02,
        validate_every=20,
        best="accuracy",
        checkpoint_dir=tmp_path / "kept",
        workers=workers,
        wait=True,
    )

    metrics = run.metrics()
    validated = metrics.dropna(subset=["test_accuracy"]).groupby("step")["test_accuracy"].first()
    assert list(validated.index) == [20, 40]
    assert validated.max() > 0.6  # a third by chance
    # plain torch: the best checkpoint is the model, under its own names
    model = make_resnet()
    saved = torch.load(tmp_path / "kept" / "best" / "full.pt", weights_only=True)["model"]
    model.load_state_dict(saved)
    assert int(saved["bn1.num_batches_tracked"]) == validated.idxmax()


def test_the_message_names_an_output_that_the_task_cannot_read(pictures):
    script = Script.load("single", task="images").with_cells(
        outputs_of="def outputs_of(model, batch):\n    return {'logits': model(batch[0])}\n"
    )
    with pytest.raises(labkit.RankFailedError, match="loss_of needs a tensor of logits; outputs_of returned dict"):
        labkit.launch(script, nproc_per_node=1, data_dir=pictures, global_batch_size=12, steps=1, wait=True)


def test_tensors_that_disagree_about_the_samples_are_told_apart():
    task = Script.load("single").cells["data"].text + (
        "\n\ndef collate(samples):\n    x, y = torch.utils.data.default_collate(samples)\n    return x, y, x[:3]\n"
    )
    script = Script.load("single").with_cells(data=task)
    with pytest.raises(labkit.RankFailedError, match=r"splits batches along their first axis, which is \[3, 8\]"):
        labkit.launch(script, nproc_per_node=1, global_batch_size=8, accumulate=2, steps=1, wait=True)
