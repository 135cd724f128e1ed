"""Whatever ends a run, the newest committed checkpoint loads and is whole; a damaged one is passed over and named.

What is loaded goes on exactly as if nothing had happened, under whatever strategy and on however many ranks.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
import torch
from faults.scene import ENDLESS, assert_over, falling, last_step, ranks_of, wait_for_step, wait_until
from sklearn.metrics import f1_score

import labkit
from labkit.host import Identity
from labkit.launcher.stopping import processes_of

SIZES = {"global_batch_size": 8, "precision": "fp64", "clip": 1.0}
SMALL = (("width=128, heads=4, layers=4", "width=32, heads=2, layers=2"), ("limit=2**20", "limit=2**16"))


def script(name: str, *replacements: tuple[str, str], extras: tuple[str, ...] = ()) -> labkit.Script:
    """One of labkit's with a small model, and with other words in place of some."""
    return small(labkit.Script.load(name, "checkpoints", "precision", *extras), *replacements)


def small(whole: labkit.Script, *replacements: tuple[str, str]) -> labkit.Script:
    text = str(whole)
    for before, after in (*SMALL, *replacements):
        assert before in text, before
        text = text.replace(before, after)
    return labkit.Script.parse(text, name=whole.name)


def train(name: str | labkit.Script, ranks: int, folder: Path | None = None, **options: object) -> labkit.Run:
    where = {"checkpoint_dir": folder} if folder else {}
    chosen = script(name) if isinstance(name, str) else name
    return labkit.launch(chosen, nproc_per_node=ranks, **{**SIZES, "wait": True, **where, **options})


def start_step(run: labkit.Run) -> int:
    return int(run._reader.read_all().ranks[0].values["start_step"])


def losses(run: labkit.Run) -> dict[tuple[int, int], float]:
    """By rank and step."""
    return run.metrics().dropna(subset=["loss"]).set_index(["rank", "step"])["loss"].to_dict()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two committed checkpoints, of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    train("zero1", 2, folder, steps=4, save_every=2, runs_dir=folder.parent / "runs")
    assert names(folder) == ["step-2", "step-4"]
    return folder


@pytest.fixture
def checkpoints(saved: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


# --- damaged, or not ours


def inflict(damage: str, file: Path) -> None:
    content = bytearray(file.read_bytes())
    file.unlink()
    if damage == "truncated":
        file.write_bytes(content[:-20])
    elif damage == "flipped":
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(content)


@pytest.fixture(scope="module")
def module() -> ModuleType:
    """A script with checkpoints, imported."""
    return imported(labkit.Script.load("ddp", "checkpoints"))


def imported(whole: labkit.Script) -> ModuleType:
    found = ModuleType("train")
    exec(str(whole), found.__dict__)
    return found


@pytest.mark.parametrize("name", ["COMMIT.json", "state.json", ".metadata", "__0_0.distcp", "__1_0.distcp"])
@pytest.mark.parametrize("damage", ["truncated", "deleted", "flipped"])
def test_damage_to_any_file_is_seen_named_and_set_aside(
    name: str, damage: str, checkpoints: Path, module: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    assert module.newest_whole(checkpoints) == checkpoints / "step-4"

    inflict(damage, checkpoints / "step-4" / name)

    assert module.newest_whole(checkpoints) == checkpoints / "step-2"
    if (name, damage) != ("COMMIT.json", "deleted"):  # without it, it is none
        assert "step-4 is damaged" in capfd.readouterr().out
        assert names(checkpoints) == ["step-2", "step-4.damaged"]


def test_the_copy_of_the_best_is_whole_or_is_the_one_before(
    checkpoints: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "metrics")
    best = checkpoints / "best"
    module.copy_whole(checkpoints / "step-2", best)
    before = (best / "full.pt").read_bytes()
    assert torch.load(best / "full.pt", weights_only=True)["optimizer"]["head.weight"]["step"] == 2

    usage = shutil.disk_usage(checkpoints)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=len(before)))
    module.copy_whole(checkpoints / "step-4", best)

    assert "step-4 not saved as best: " in caplog.text
    assert (best / "full.pt").read_bytes() == before
    assert json.loads((best / "state.json").read_text())["step"] == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"files": 5}', '{"files": {}}', '{"files": {"state.json": 1}}'])
def test_a_commit_that_says_nothing_is_no_commit(content: str, checkpoints: Path, module: ModuleType) -> None:
    for step in ("step-2", "step-4"):
        (checkpoints / step / "COMMIT.json").write_text(content)
    assert module.newest_whole(checkpoints) is None


@pytest.mark.soak  # as one that was damaged before
@pytest.mark.parametrize(("name", "damage"), [("__1_0.distcp", "flipped"), ("COMMIT.json", "truncated")])
def test_a_run_resumes_from_the_older_one_and_saves_that_step_again(name: str, damage: str, checkpoints: Path) -> None:
    inflict(damage, checkpoints / "step-4" / name)

    run = train("ddp", 2, checkpoints, steps=4, save_every=4)

    assert start_step(run) == 2
    assert "step-4 is damaged" in run.logs(rank=0)
    assert names(checkpoints) == ["step-2", "step-4", "step-4.damaged"]


def test_a_checkpoint_of_another_model_is_refused_in_one_sentence(checkpoints: Path) -> None:
    with pytest.raises(labkit.RankFailedError) as caught:
        train(script("ddp", ("layers=2", "layers=4")), 2, checkpoints, steps=6)

    sentence = str(caught.value)
    assert "step-4 is of another model: blocks.2.down.bias is not in it and [32] here; 24 differ" in sentence
    logs = labkit.attach("latest").logs(rank=0) + labkit.attach("latest").logs(rank=1)
    assert "Traceback" not in sentence + logs
    assert names(checkpoints) == ["step-2", "step-4"]


def test_damaged_a_second_time_a_step_does_not_stand_in_its_own_way(checkpoints: Path) -> None:
    """What was set aside the first time has its name."""
    shutil.copytree(checkpoints / "step-4", checkpoints / "step-4.damaged")
    inflict("flipped", checkpoints / "step-4" / "__1_0.distcp")

    run = train("ddp", 2, checkpoints, steps=4)

    assert start_step(run) == 2
    assert "step-4 is damaged" in run.logs(rank=0)
    assert names(checkpoints) == ["step-2", "step-4", "step-4.damaged"]


def test_what_is_not_ours_in_the_folder_is_named_and_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs" / "step-2"
    theirs.mkdir(parents=True)
    (theirs / ".metadata").write_text("a pickle that nobody should open")

    run = train("ddp", 1, theirs.parent, steps=4, save_every=2)

    assert start_step(run) == 0
    assert "has no intact checkpoint of this script: training starts at step 0" in run.logs(rank=0)
    assert f"step 2 not saved: {theirs} already exists" in run.logs(rank=0)
    assert names(theirs.parent) == ["step-2", "step-4"]
    assert names(theirs) == [".metadata"]


def test_a_folder_that_cannot_be_one_ends_every_rank_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(labkit.RankFailedError, match="--checkpoint-dir cannot be used: .*File exists: .*file"):
        train("ddp", 2, tmp_path / "file", steps=2, save_every=1)
    assert "Traceback" not in labkit.attach("latest").logs(rank=1, stream="stdout")


# --- resumed


RANDOM_WINDOWS = """
import os
from pathlib import Path

import torch
from torch.utils.data import Dataset


class Windows(Dataset):  # epochs of 7 steps
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()

    def __len__(self):
        return 56

    def __getitem__(self, number):
        start = int(torch.randint(0, 5000, ()))
        return self.text[start : start + 128], self.text[start + 1 : start + 129]


def load_datasets(data_dir):
    return Windows(), Windows()
"""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("ddp", {"find_unused_parameters": True}, marks=pytest.mark.soak),
        ("fsdp", {"full_checkpoints": True, "async_save": True}),
    ],
)
def test_resumed_in_mid_epoch_the_losses_are_exactly_the_same(
    name: str, options: dict[str, bool], tmp_path: Path
) -> None:
    """With dropout, and with samples that workers draw at random."""
    dropout = script(
        name,
        ("x = x + self.out(", "x = x + F.dropout(self.out("),
        ("transpose(1, 2).flatten(2))", "transpose(1, 2).flatten(2)), 0.3, self.training)"),
        ("self.norm, self.head =", "self.unused = nn.Linear(3, 3)\n        self.norm, self.head ="),
    ).with_cells(data=RANDOM_WINDOWS)
    folder, options = tmp_path / "checkpoints", {"steps": 9, "workers": 2, **options}
    whole = train(dropout, 2, folder, save_every=3, **options)
    assert names(folder) == ["step-6", "step-9"]
    shutil.rmtree(folder / "step-9")

    resumed = train(dropout, 2, folder, **options)

    assert start_step(resumed) == 6
    expected = losses(whole)
    assert losses(resumed) == {(rank, step): expected[rank, step] for rank in (0, 1) for step in (7, 8, 9)}
    assert whole.metrics()["test_loss"].dropna().iloc[0] == resumed.metrics()["test_loss"].dropna().iloc[0]


@pytest.mark.soak  # as above, with samples that the rank draws itself
@pytest.mark.parametrize("options", [{}, {"workers": 2}])
def test_resumed_in_its_second_epoch_it_draws_the_same_random_samples(options: dict[str, int], tmp_path: Path) -> None:
    augmented = script("single").with_cells(data=RANDOM_WINDOWS)
    folder, options = tmp_path / "checkpoints", {"steps": 14, **options}
    whole = train(augmented, 1, folder, save_every=5, **options)
    assert names(folder) == ["step-10", "step-14"]  # saved at its end, too
    shutil.rmtree(folder / "step-14")

    resumed = train(augmented, 1, folder, **options)

    expected = losses(whole)
    assert losses(resumed) == {(0, step): expected[0, step] for step in (11, 12, 13, 14)}


NORMED = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(128), nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.relu(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.blocks, self.head = nn.Embedding(256, 16), nn.Sequential(Block(), Block()), nn.Linear(16, 256)

    def embed(self, tokens):
        return self.tokens(tokens)

    def unembed(self, x):
        return self.head(x)

    def forward(self, tokens):
        return self.unembed(self.blocks(self.embed(tokens)))
"""


@pytest.mark.soak
def test_resumed_with_batch_norm_the_losses_are_exactly_the_same(tmp_path: Path) -> None:
    """Each rank's statistics are its own until DDP spreads those of rank 0."""
    folder, normed = tmp_path / "checkpoints", labkit.Script.load("ddp", "checkpoints").with_cells(model=NORMED)
    whole = train(normed, 2, folder, steps=6, save_every=3)
    shutil.rmtree(folder / "step-6")

    resumed = train(normed, 2, folder, steps=6)

    expected = losses(whole)
    assert losses(resumed) == {(rank, step): expected[rank, step] for rank in (0, 1) for step in (4, 5, 6)}
    assert whole.metrics()["test_loss"].dropna().iloc[0] == resumed.metrics()["test_loss"].dropna().iloc[0]


def test_a_pipeline_counts_in_batch_norm_what_it_trained_on(tmp_path: Path) -> None:
    """And not the forward by which torch learns the shapes that stages hand on."""
    normed = labkit.Script.load("pipeline", "checkpoints").with_cells(model=NORMED)
    train(normed, 2, tmp_path / "checkpoints", steps=1, accumulate=2, full_checkpoints=True)

    model = torch.load(tmp_path / "checkpoints" / "step-1" / "full.pt", weights_only=True)["model"]
    assert [int(model[f"blocks.{n}.norm.num_batches_tracked"]) for n in (0, 1)] == [2, 2]
    assert all(model[f"blocks.{n}.norm.running_var"].max() < 10 for n in (0, 1))


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One, of step 4, of four FSDP ranks."""
    folder = tmp_path_factory.mktemp("four") / "checkpoints"
    train("fsdp", 4, folder, steps=4, save_every=4, full_checkpoints=True, runs_dir=folder.parent / "runs")
    assert names(folder / "step-4") == ["COMMIT.json", "full.pt", "state.json"]
    return folder


@pytest.mark.soak  # test_relay.py and lab 16 do the same
@pytest.mark.parametrize(
    ("origin", "name", "ranks"),
    [
        pytest.param("saved_by_four", "ddp", 2, marks=pytest.mark.soak),
        pytest.param("saved_by_four", "single", 1, marks=pytest.mark.soak),
        pytest.param("saved", "ddp", 4, marks=pytest.mark.soak),
        ("saved", "fsdp", 2),
    ],
)
def test_resumed_on_other_ranks_and_by_another_strategy_the_losses_are_the_same(
    origin: str, name: str, ranks: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = shutil.copytree(request.getfixturevalue(origin), tmp_path / "checkpoints")
    whole = losses(train("single", 1, steps=6))

    run = train(name, ranks, folder, steps=6)

    assert start_step(run) == 4
    means = run.metrics().groupby("step")["loss"].mean()  # of equal shares
    for step in (5, 6):
        assert means[step] == pytest.approx(whole[0, step], rel=1e-12)


@pytest.mark.soak  # on two ranks: of the best
def test_a_full_checkpoint_needs_nothing_but_torch(saved_by_four: Path, module: ModuleType) -> None:
    found = torch.load(saved_by_four / "step-4" / "full.pt", weights_only=True)

    model = module.Model(width=32, heads=2, layers=2).double()
    model.load_state_dict(found["model"])
    assert found["optimizer"].keys() == {name for name, _ in model.named_parameters()}
    assert found["optimizer"]["head.weight"]["step"] == 4
    assert found["optimizer"]["head.weight"]["exp_avg"].shape == model.head.weight.shape


def spread(tmp_path: Path, ranks: int, saved: str, loaded: str) -> set[str]:
    """What `tests/scripts/strategies.py` could save one way and load another."""
    cells, _, _ = str(labkit.Script.load("single", "checkpoints")).partition("# %% main\n")
    main = Path(__file__).parents[1] / "scripts" / "strategies.py"
    text = labkit.Script.parse(cells + main.read_text(), name="strategies")
    (tmp_path / "spread").mkdir(exist_ok=True)
    run = labkit.launch(text, nproc_per_node=ranks, args=[str(tmp_path / "spread"), saved, loaded], wait=True)
    return {line for line in run.logs(rank=0, stream="stdout").splitlines() if " -> " in line}


@pytest.mark.soak  # test_relay.py has a pipeline
def test_stages_that_hold_parts_of_the_model_save_what_one_rank_can_load_and_the_reverse(tmp_path: Path) -> None:
    found = spread(tmp_path, 2, "stages,fsdp", "single,stages")
    formats = ["stages", "stages_full", "fsdp", "fsdp_full"]
    assert found == {f"{format} -> {how}" for format in formats for how in ("single", "stages")}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_strategy_loads_what_every_other_saved(tmp_path: Path) -> None:
    """Data, sharded, tensor and pipeline parallel and their mixtures, on four ranks, then on one."""
    strategies = [
        "single",
        "ddp",
        "zero1",
        "fsdp",
        "hsdp",
        "fsdp1",
        "fsdp1_grad",
        "fsdp1_none",
        "tensor",
        "fsdp_tensor",
        "stages",
    ]
    formats = [name + full for name in strategies for full in ("", "_full")]
    found = spread(tmp_path, 4, ",".join(strategies), ",".join(strategies))
    assert found == {f"{format} -> {how}" for format in formats for how in strategies}
    assert spread(tmp_path, 1, "", "single") == {f"{format} -> single" for format in formats}


# --- what is resumed besides the weights


def test_the_learning_rate_and_weight_decay_of_a_resumed_run_are_those_that_are_given(checkpoints: Path) -> None:
    """This decay leaves nothing of the weights, and a model without weights guesses."""
    run = train("single", 1, checkpoints, steps=5, lr=1e-12, weight_decay=1e12)

    assert start_step(run) == 4
    assert run.metrics()["test_loss"].dropna().item() == pytest.approx(math.log(256), rel=1e-6)


WINDOWS = """
import torch
from torch.utils.data import IterableDataset, TensorDataset


class Windows(IterableDataset):  # 44 of them, then it ends
    windows = torch.arange(44 * 33).square().remainder(251).unfold(0, 33, 33)

    def __iter__(self):
        return ((window[:-1], window[1:]) for window in self.windows)


class Stateful(Windows):  # as those of Hugging Face: a state that was loaded is where every iterator begins
    loaded = at = None

    def __iter__(self):
        for self.at in range(self.loaded or 0, 44):
            window = self.windows[self.at]
            self.at += 1
            yield window[:-1], window[1:]

    def state_dict(self):
        return self.at

    def load_state_dict(self, state):
        self.loaded = state
        print(f"loaded {state}", flush=True)


def load_datasets(data_dir):
    windows = Windows.windows
    return Stream(Windows(), epoch_samples=32), TensorDataset(windows[:10, :-1], windows[:10, 1:])
"""


STREAMED = {"steps": 14, "global_batch_size": 8}


def streaming(strategy: str, dataset: str = "Windows()") -> labkit.Script:
    return script(strategy, extras=("streaming",)).with_cells(data=WINDOWS.replace("Windows(),", f"{dataset},"))


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one rank that reads the stream without a break."""
    run = train(streaming("single"), 1, runs_dir=tmp_path_factory.mktemp("streamed"), **STREAMED)
    return {step: loss for (_, step), loss in losses(run).items()}


@pytest.mark.parametrize("dataset", [pytest.param("Windows()", marks=pytest.mark.soak), "Stateful()"])
def test_a_stream_resumes_where_it_was_with_and_without_a_state(dataset: str, streamed: dict[int, float]) -> None:
    """In the middle of an epoch and of a pass, on two ranks; after it the stream ends, and begins once more."""
    run = train(falling(streaming("ddp", dataset), step=7), 2, save_every=6, retries=1, **STREAMED)

    assert (run.status().state, run.status().attempt) == ("succeeded", 2)
    assert ("loaded 4\n" in run.logs(rank=0)) == (dataset == "Stateful()")  # 6 steps of 8 from passes of 44
    resumed = run.metrics().query("attempt == 2").dropna(subset=["loss"])
    means = resumed.groupby("step")["loss"].mean().to_dict()  # of equal shares
    assert means == pytest.approx({step: streamed[step] for step in range(7, 15)}, rel=1e-12)


# --- validation: the best is kept, and training stops when nothing improves


FEW_DIGITS = """
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    digits = load_digits()
    images, labels = torch.tensor(digits.images)[:, None] / 16, torch.tensor(digits.target)
    noise = torch.randint(10, (64,), generator=torch.Generator().manual_seed(0))
    wrong = torch.where(torch.arange(64) % 4 == 0, noise, labels[:64])  # every fourth
    return TensorDataset(images[:64], wrong), TensorDataset(images[64:203], labels[64:203])
"""


VALIDATED = {"steps": 100, "lr": 3e-3, "validate_every": 5}


def learning(strategy: str) -> labkit.Script:
    whole = labkit.Script.load(strategy, "checkpoints", "precision", "validate", task="digits")
    return whole.with_cells(data=FEW_DIGITS)


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """Test loss and accuracy by step, on one rank: of a model that learns 64 digits by heart, some of them wrong."""
    run = train(learning("single"), 1, runs_dir=tmp_path_factory.mktemp("curve"), **{**VALIDATED, "steps": 35})
    found = run.metrics().dropna(subset=["test_loss"]).drop_duplicates("step", keep="last").set_index("step")
    assert list(found.index) == [5, 10, 15, 20, 25, 30, 35]
    assert found["test_loss"].idxmin() == found["test_accuracy"].idxmax() == 20
    return found


@pytest.mark.parametrize(
    ("strategy", "best", "options"),
    [pytest.param("ddp", "loss", {}, marks=pytest.mark.soak), ("fsdp", "accuracy", {"full_checkpoints": True})],
)
def test_the_best_is_kept_and_all_ranks_stop_for_want_of_a_better_one_though_killed_between(
    strategy: str, best: str, options: dict[str, bool], curve: pd.DataFrame
) -> None:
    """It goes on from step 27, when one validation had found nothing better."""
    script = falling(learning(strategy), step=28)
    run = train(script, 2, **VALIDATED, save_every=27, retries=1, best=best, patience=3, **options)

    state, metrics, kept = run.status(), run.metrics(), run.folder.checkpoints
    assert (state.state, state.attempt, state.earlier[0]["checkpoint"]) == ("succeeded", 2, "step-27")
    assert metrics.groupby("rank")["step"].max().to_dict() == {0: 35, 1: 35}
    assert f"no better {best} in 3 validations: the best was at step 20" in run.logs(rank=0)
    value = pytest.approx(curve[f"test_{best}"][20], rel=1e-9)
    last = metrics.dropna(subset=["best_step"]).iloc[-1]
    assert (last["step"], last["best_step"], last[f"best_{best}"]) == (35, 20, value)
    assert names(kept) == ["best", "step-27", "step-35"]
    notes = json.loads((kept / "step-35" / "state.json").read_text())["notes"]
    assert (notes["best"], notes["best_step"], notes["since_best"]) == (value, 20, 3)
    weights = torch.load(kept / "best" / "full.pt", weights_only=True)["model"]
    assert measured(script, weights)[best] == value
    assert json.loads((kept / "best" / "state.json").read_text())["step"] == 20
    if options.get("full_checkpoints"):
        parameters = dict(imported(script).Model().named_parameters())
        optimizer = torch.load(kept / "step-35" / "full.pt", weights_only=True)["optimizer"]
        assert {name: held["exp_avg"].shape for name, held in optimizer.items()} == {
            name: parameter.shape for name, parameter in parameters.items()
        }


def measured(whole: labkit.Script, weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """The loss and the accuracy of a model with these weights, by torch alone."""
    module = imported(whole)
    model, (images, labels) = module.Model().double(), module.load_datasets("")[1].tensors
    model.load_state_dict(weights)
    with torch.no_grad():
        outputs = model.eval()(images.double())
    accuracy = (outputs.argmax(-1) == labels).double().mean()
    return {"loss": float(torch.nn.functional.cross_entropy(outputs, labels)), "accuracy": float(accuracy)}


def test_a_metric_of_all_predictions_is_scikit_learns_on_one_rank_and_on_two(tmp_path: Path) -> None:
    """The last batch is smaller than the others, and there is an odd number of them."""
    folder, options = tmp_path / "checkpoints", {"steps": 4, "global_batch_size": 22}
    whole = labkit.Script.load("ddp", "checkpoints", "precision", "gather_metrics", task="digits")
    two = train(whole, 2, folder, validate_every=3, best="f1", **options)
    best = (folder / "best" / "full.pt").read_bytes()
    shutil.rmtree(folder / "best")  # as if it had been killed before
    one = train(whole, 1, folder, validate_every=3, best="f1", **options)  # nothing is left to train

    module = imported(whole)
    model, (images, labels) = module.Model().double(), module.load_datasets("")[1].tensors
    model.load_state_dict(torch.load(folder / "best" / "full.pt", weights_only=True)["model"])
    with torch.no_grad():
        predicted = model(images.double()).argmax(-1)
    assert divmod(len(images), 11) == (32, 8)
    expected = f1_score(labels, predicted, average="macro")
    assert 0.1 < expected < 0.9
    for run in (two, one):
        assert run.metrics()["test_f1"].dropna().iloc[-1] == pytest.approx(expected, rel=1e-12)
    assert (folder / "best" / "full.pt").read_bytes() == best


# --- killed


def check_kills(trials: int, seed: int, tmp_path: Path) -> None:
    """SIGKILL everything at a random moment of continuous saving; what is committed must load and go on."""
    chance, folder, committed = random.Random(seed), tmp_path / "checkpoints", 0
    for trial in range(trials):
        ways = {"async_save": bool(trial & 1), "full_checkpoints": bool(trial & 2)}
        run = train("ddp", 2, folder, steps=ENDLESS, save_every=1, wait=False, **ways)
        wait_for_step(run.folder, committed + 2)
        assert start_step(run) == committed
        time.sleep(chance.uniform(0.0, 1.0))
        for process in processes_of(run.folder):
            process.kill()
        with pytest.raises(labkit.RankFailedError):
            run.wait()
        assert_over(run.folder)
        newest = run.status().checkpoint
        assert newest
        commit = json.loads((folder / newest / "COMMIT.json").read_text())
        committed = commit["step"]
        assert newest == f"step-{committed}"
    assert start_step(train("ddp", 2, folder, steps=committed + 1)) == committed


def test_killed_at_random_while_saving(tmp_path: Path) -> None:
    check_kills(2, seed=1, tmp_path=tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_killed_at_random_while_saving_many_times(tmp_path: Path) -> None:
    check_kills(25, seed=2, tmp_path=tmp_path)


# --- stopped


def test_a_stop_saves_after_its_step_also_with_workers_and_the_run_resumes_there() -> None:
    run = train("ddp", 2, steps=ENDLESS, save_every=ENDLESS, workers=2, wait=False)
    wait_for_step(run, 5)
    assert len(processes_of(run.folder)) >= 2 + 2 * 2  # ranks, and workers of each

    state = run.stop()

    assert (state.state, state.killed) == ("stopped", 0)
    steps = {last_step(run.folder, rank) for rank in (0, 1)}
    assert [state.checkpoint] == [f"step-{step}" for step in steps]
    assert f"stopped by SIGTERM after step {steps.pop()} of" in run.logs(rank=0)


@pytest.mark.soak
def test_a_stop_waits_for_the_end_of_a_long_step(tmp_path: Path) -> None:
    """The grace period alone would end it unsaved."""
    slow = script("ddp", ("    loss = loss_of(out", "    __import__('time').sleep(4)\n    loss = loss_of(out"))
    run = train(slow, 2, tmp_path / "checkpoints", steps=ENDLESS, wait=False)
    wait_for_step(run, 1)

    state = run.stop(grace=1)

    assert (state.state, state.killed) == ("stopped", 0)
    assert names(tmp_path / "checkpoints") == [state.checkpoint]


def test_ranks_of_which_one_is_asked_to_stop_leave_after_the_same_step(tmp_path: Path) -> None:
    run = train("fsdp", 2, tmp_path / "checkpoints", steps=ENDLESS, wait=False)
    wait_for_step(run, 30)

    ranks_of(run.folder)[1].terminate()

    assert run.wait().state == "succeeded"
    steps = {last_step(run.folder, rank) for rank in (0, 1)}
    assert [run.status().checkpoint] == [f"step-{step}" for step in steps]


@pytest.mark.soak  # lab 20 does the same
def test_at_the_deadline_the_ranks_save_and_leave() -> None:
    began = time.monotonic()
    run = train("ddp", 2, steps=ENDLESS, deadline_seconds=2, async_save=True)

    assert run.status().state == "succeeded"
    assert time.monotonic() - began < 60
    step = last_step(run.folder, 0)
    assert names(run.folder.checkpoints) == [f"step-{step}"]
    assert f"stopped by the deadline after step {step} of" in run.logs(rank=0)


def test_training_continues_while_a_checkpoint_is_written_and_not_yet_committed() -> None:
    slow = script("ddp", ("        commit(beside, step)\n", "        __import__('time').sleep(600)\n"))
    run = train(slow, 2, steps=ENDLESS, save_every=50, async_save=True, global_batch_size=4, wait=False)
    beside = run.folder.checkpoints / "step-50.tmp"
    wait_until((beside / ".metadata").exists)
    wait_for_step(run, 60)  # at 100 it waits for the one before

    assert run.status().checkpoint is None
    run.stop(grace=0)
    assert run.status().checkpoint is None
    assert names(run.folder.checkpoints) == ["step-50.tmp"]


def slow_to_save(seconds: int) -> labkit.Script:
    """It prints "saving", then keeps writing to the folder for this long before it saves."""
    saving = (
        "            print('saving', flush=True)\n"
        f"            for i in range({10 * seconds}):\n"
        "                __import__('time').sleep(0.1); (beside / 'x').write_text(str(i))\n"
    )
    before = "            dcp.save(tensors, "
    return script("ddp", (before, saving + before))


def saving(run: labkit.Run) -> bool:
    return "saving" in run.logs(rank=0)


def test_a_stop_lets_the_checkpoint_that_is_being_saved_finish(tmp_path: Path) -> None:
    """It comes in the middle of one; then the step that it ended in is saved."""
    run = train(slow_to_save(3), 2, steps=ENDLESS, save_every=500, wait=False)
    wait_until(lambda: saving(run))

    state = run.stop()

    assert (state.state, state.killed) == ("stopped", 0)
    assert names(run.folder.checkpoints) == ["step-500", state.checkpoint]
    assert 500 < int(state.checkpoint.removeprefix("step-")) < 1000


@pytest.mark.soak
def test_a_stop_lets_the_checkpoint_finish_that_it_asks_for(tmp_path: Path) -> None:
    """Which takes longer than the grace period."""
    run = train(slow_to_save(8), 2, tmp_path / "checkpoints", steps=ENDLESS, wait=False)
    wait_for_step(run, 5)

    state = run.stop()

    assert saving(run)
    assert (state.state, state.killed) == ("stopped", 0)
    assert names(tmp_path / "checkpoints") == [state.checkpoint]


def test_a_second_stop_does_not_wait_for_the_checkpoint(tmp_path: Path) -> None:
    run = train(slow_to_save(30), 2, steps=50, save_every=2, wait=False)
    wait_until(lambda: saving(run))
    first = threading.Thread(target=run.stop)
    first.start()
    time.sleep(1)
    assert not run.status().is_final

    began = time.monotonic()
    assert run.stop(grace=0).state == "stopped"
    assert time.monotonic() - began < 3
    first.join(timeout=10)
    assert not first.is_alive()


def test_a_second_live_run_on_one_checkpoint_folder_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    (tmp_path / "elsewhere").symlink_to(saved)
    options = {"nproc_per_node": 1, "steps": 1000, "save_every": 2, "global_batch_size": 4, "wait": False}
    first = labkit.launch("ddp", checkpoint_dir=saved, **options)

    with pytest.raises(labkit.LaunchError, match=rf"run {first.id} on \S+ is still running and saves its checkpoints"):
        labkit.launch("ddp", checkpoint_dir=tmp_path / "elsewhere", **options)

    wait_until(lambda: first.folder.newest_checkpoint(), 60, "a checkpoint")
    first.stop()
    second = labkit.launch("ddp", checkpoint_dir=saved, **options)  # at once: nothing has to be waited for
    wait_for_step(second.folder, 3)
    assert "resumes after step" in second.logs(rank=0)
    os.kill(Identity.read(json.loads(second.folder.agent.read_text())["supervisor"]).pid, signal.SIGKILL)
    wait_until(lambda: second.status().state == "lost", 30, "its loss to be seen")
    assert labkit.launch("ddp", checkpoint_dir=saved, **options).stop().state == "stopped"


SAVED_IN_THE_BACKGROUND = """
import sys
from types import SimpleNamespace

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Linear(2, 2)
args = SimpleNamespace(checkpoint_dir=sys.argv[1], save_every=0, deadline_seconds=0, full_checkpoints=False,
                       async_save=True)
checkpoints = Checkpoints(model, torch.optim.AdamW(model.parameters()), torch.device("cpu"), args)
random_state = dict
torch.cuda.is_available = lambda: True
checkpoints.save(7)
checkpoints.finish()
"""


def test_a_save_in_the_background_asks_nothing_of_a_simulated_gpu(tmp_path):
    """Its thread has not chosen a GPU: every rank's would open a context on the first. Here any call to CUDA fails."""
    program = tmp_path / "saves.py"
    text = str(labkit.Script.load("single", "checkpoints")).partition("\nif __name__")[0]
    program.write_text(text + SAVED_IN_THE_BACKGROUND)
    done = subprocess.run([sys.executable, program, tmp_path / "c"], capture_output=True, text=True, timeout=120)
    assert (tmp_path / "c" / "step-7" / "COMMIT.json").exists(), done.stderr
