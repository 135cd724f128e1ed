"""Single cells of labkit's scripts at their edges, in a group of one rank or a made-up one of two."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import PORTS, listening
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import Dataset, Subset, TensorDataset

from labkit.write import Script
from labkit.write.compose import library

INTEGER = "def count_of(batch):\n    return int((batch[1] != -100).sum())\n"
TOKENS = torch.randint(256, (8, 16), generator=torch.Generator().manual_seed(0))
BATCH = TOKENS[:, :-2].contiguous(), TOKENS[:, 2:].contiguous()


@pytest.fixture
def alone(monkeypatch):
    """Scripts as modules, with options, in a group of one rank."""
    monkeypatch.delenv("RANK", raising=False)

    def of(script: Script, *options: str) -> Any:
        module = ModuleType("train")
        monkeypatch.setattr(sys, "argv", ["train.py", *options])
        monkeypatch.setitem(sys.modules, "train", module)
        exec(compile(str(script), "train.py", "exec"), vars(module))
        return module

    yield of
    if dist.is_initialized():
        dist.destroy_process_group()
    PORTS.update(listening())  # of gloo: torch's caches of meshes keep some groups


def first_step(module, batch=BATCH):
    """The first step's loss."""
    args, device = module.parse_args(), module.join_group()
    torch.manual_seed(0)
    mesh = module.make_mesh(device.type, args)
    model = module.Model()
    if hasattr(module, "in_precision"):
        model = module.in_precision(model, device, args)
    return module.forward_backward(module.parallelize(model.train(), mesh, device, args), batch, mesh["data"], args)


@pytest.mark.parametrize("strategy", ["single", "diloco", "context_parallel", "pipeline"])
def test_a_count_may_be_an_integer(alone, strategy):
    script = Script.load(strategy)
    integer = first_step(alone(script.with_cells(count_of=INTEGER)))
    dist.destroy_process_group()

    assert integer == first_step(alone(script))


def test_micro_batches_are_one_function_wherever_a_cell_has_it():
    cells = [cell for part in library().parts for cell in part.cells if "micro_batches" in cell.defines]

    assert len(cells) == 3
    assert len({cell.text for cell in cells}) == 1
    assert "micro_batches" not in str(Script.load("ddp"))


@pytest.mark.parametrize("script", [Script.load("ddp", "accumulate"), Script.load("diloco")], ids=["ddp", "diloco"])
@pytest.mark.parametrize(
    ("batch", "number", "sentence"),
    [
        ((torch.zeros(8, 2), torch.zeros(4)), 2, r"first axis, which is \[4, 8\]"),
        ((torch.zeros(8, 2), torch.tensor(1.0)), 2, r"first axis, which is \[0, 8\]"),
        ((torch.zeros(8), torch.zeros(8)), 3, "--accumulate 3 does not divide a rank's batch of 8 samples"),
        ((torch.zeros(8), torch.zeros(8)), 0, "--accumulate 0 does not divide a rank's batch of 8 samples"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(alone, script, batch, number, sentence):
    with pytest.raises(SystemExit, match=sentence):
        alone(script).micro_batches(batch, number)


def test_a_batch_that_need_not_be_split_may_have_any_tensors(alone):
    batch = torch.zeros(8, 2), torch.tensor(1.0)
    assert alone(Script.load("diloco")).micro_batches(batch, 1) == [batch]
    parts = alone(Script.load("diloco")).micro_batches({"x": torch.arange(6)}, 3)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(("train", "test"), [(0, 8), (8, 0)])
def test_data_of_which_a_part_is_empty_is_refused_before_training(alone, train, test):
    module = alone(Script.load("single"), "--global-batch-size", "4", "--steps", "1")
    module.load_datasets = lambda data_dir: tuple(TensorDataset(TOKENS[:n], TOKENS[:n]) for n in (train, test))
    module.parallelize = lambda *args: pytest.fail("trained")

    with pytest.raises(SystemExit, match=f"returned {train} training and {test} test samples"):
        module.main()


def test_an_unknown_best_is_refused_before_training(alone):
    module = alone(Script.load("single", "validate"), "--best", "quality")
    module.parallelize = lambda *args: pytest.fail("trained")

    with pytest.raises(SystemExit, match="is a low or a high quality good"):
        module.main()


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_chunks_head_computes_in_the_precision_of_the_whole_one(alone, strategy):
    types, losses = [], []

    class Head(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            types.append(logits.dtype)
            return logits.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    for chunk in ("0", "10"):
        module = alone(Script.load(strategy, "chunked_loss", "precision"), "--precision", "bf16", "--loss-chunk", chunk)
        plain = module.loss_of_logits
        module.loss_of_logits = lambda logits, labels, plain=plain: plain(Head.apply(logits), labels)
        losses.append(float(first_step(module)))
        dist.destroy_process_group()

    assert {*types} == {torch.bfloat16}
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_head_outside_of_ddp_is_not_looked_for_among_unused_parameters(alone):
    script = Script.load("ddp", "ddp_options", "chunked_loss")
    module = alone(script, "--find-unused-parameters", "--loss-chunk", "10")

    with pytest.raises(SystemExit, match="leave out --find-unused-parameters"):
        first_step(module)


class Noise(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(()).item()


@pytest.mark.parametrize("dataset", [Noise(), Subset(Noise(), range(4))], ids=["plain", "subset"])
def test_augmentation_depends_on_the_sample_alone(alone, dataset):
    module = alone(Script.load("single", "workers"))

    def values(*chunks):
        args = SimpleNamespace(seed=0, workers=1, prefetch=2, pin_memory=False)
        return [batch.tolist() for batch in module.loader_of(dataset, chunks, args, 0)]

    ((a, b), (c, d)) = values([0, 1], [2, 3])
    assert values([0, 2], [1, 3]) == [[a, c], [b, d]]


def test_a_loss_over_all_ranks_is_refused_where_replicas_train_alone():
    cell = Script.load("diloco", task="image_text").cells["strategy"].text
    names: dict[str, Any] = {}
    exec(cell, names)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(SystemExit, match="use ddp, not diloco"):
            names["make_mesh"]("cpu", SimpleNamespace(sync_every=2))
    finally:
        dist.destroy_process_group()
    assert "use ddp, not diloco" not in str(Script.load("diloco"))
