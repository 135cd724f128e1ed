"""Models of timm and torchvision under the task `images`: trained, exported, loaded, refused."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from PIL import Image
from safetensors.torch import load_file
from strategies.matrix import curve, difference

import labkit
from labkit import Script

PACKAGES = Path(__file__).parents[2] / "build" / "vision"
pytestmark = pytest.mark.skipif(not PACKAGES.exists(), reason="needs timm and torchvision: make build/vision")
SHORT = {"steps": 3, "global_batch_size": 8, "classes": 2, "image_size": 64, "wait": True}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Wide and grey pictures among others, in two classes."""
    folder, random = tmp_path_factory.mktemp("pictures"), numpy.random.default_rng(0)
    for part, count in (("train", 24), ("test", 6)):
        for number in range(count):
            name = ("dark", "light")[number % 2]
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            shape = (48, 96, 3) if number % 3 else (70, 70)
            pixels = random.integers(128 * (number % 2), 128 + 127 * (number % 2), shape, dtype=numpy.uint8)
            Image.fromarray(pixels).save(folder / part / name / f"{number}.png")
    return folder


def launch(strategy, *extras, **options):
    script = Script.load(strategy, *extras, task="images")
    return labkit.launch(script, env={"PYTHONPATH": str(PACKAGES)}, **SHORT | options)


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("test_vit.r160_in1k", "fsdp"),
        pytest.param("torchvision:mobilenet_v3_small", "ddp", marks=pytest.mark.soak),
        pytest.param("test_resnet", "zero2", marks=pytest.mark.soak),
        pytest.param("torchvision:vit_b_16", "fsdp", marks=pytest.mark.soak),
        pytest.param("torchvision:resnet18", "zero1", marks=pytest.mark.soak),
    ],
)
def test_a_model_is_trained_and_its_weights_start_another_with_other_classes(model, strategy, pictures, tmp_path):
    out = tmp_path / "out"
    size = {"image_size": 224} if "vit_b" in model else {}
    first = launch(strategy, "export", nproc_per_node=2, model=model, data_dir=pictures, export_dir=out, **size)
    assert first.metrics()["loss"].notna().any()

    options = {"steps": 1, "lr": 0.0, "classes": 5, "weights": out / "model.safetensors"}
    launch("single", "export", nproc_per_node=1, model=model, data_dir=pictures, export_dir=tmp_path / "again",
           **size | options)  # fmt: skip
    before, after = load_file(out / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name].shape != after[name].shape}
    assert len(changed) == 2  # the new last layer's weight and bias
    assert all((before[name] == after[name]).all() for name in before.keys() - changed if "running" not in name
               and "num_batches" not in name)  # fmt: skip


@pytest.mark.soak
def test_two_ranks_train_what_one_trains(pictures, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))
    options = {"global_batch_size": 8, "classes": 2, "image_size": 64, "model": "test_vit", "data_dir": pictures}
    curves = {}
    for strategy, ranks in (("single", 1), ("fsdp", 2)):
        script = Script.load(strategy, task="images")
        text = script.cells["data"].text
        assert "part == folder," in text
        script = script.with_cells(data=text.replace("part == folder,", "False,"))  # each rank crops at random
        curves[strategy] = curve(script, ranks, **options)
    assert difference(curves["fsdp"], curves["single"]) < 1e-9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "test_vit.laion"}, "timm has no such model; close names: test_vit, "),
        pytest.param(
            {"model": "test_vit", "pretrained": True},
            "Without internet, pass the file of --model with --weights",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            {"model": "torchvision:resnet51"},
            "torchvision has no such model; close names: resnet50",
            marks=pytest.mark.soak,
        ),
        pytest.param({"model": "torchvision:squeezenet1_0"}, "its last layer is not a Linear", marks=pytest.mark.soak),
    ],
)
def test_what_cannot_be_had_is_said_in_a_sentence(options, message, pictures):
    with pytest.raises(labkit.RankFailedError) as failure:
        launch("single", nproc_per_node=1, data_dir=pictures, **options)
    assert message in str(failure.value)
