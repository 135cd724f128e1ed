"""What a script logs to a tracker is recorded, and its calls do what they do without labkit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from labkit.record import RankHistory, Records, rows
from labkit.record.records import Report
from labkit.worker import guest, trackers
from labkit.worker.recorder import Recorder
from labkit.worker.trackers import MOST_NAMES, Trackers
from unit.test_guest import run

TRAINING = """
import torch
model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=.1)
def step():
    loss = model(torch.ones(1, 2)).sum(); loss.backward(); optimizer.step(); return loss
"""
# By the package that it needs: how a script logs `val/accuracy` 0.5 and 0.75 at its steps 1 and 2.
SCRIPTS = {
    "tensorboard": """
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter("out")
def log(value, at):
    writer.add_scalar("val/accuracy", value, at); writer.add_scalars("val", {"f1": value}, global_step=at)
""",
    "tensorboardX": """
from tensorboardX import SummaryWriter
writer = SummaryWriter("out")
def log(value, at): writer.add_scalar("val/accuracy", value, global_step=at)
""",
    "wandb": """
import os; os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
import wandb
wandb.init(dir=".")
def log(value, at): wandb.log({"val/accuracy": value, "name": "a text", "bins": wandb.Histogram([1, 2])}, step=at)
""",
    "wandb disabled": """
import os; os.environ["WANDB_MODE"] = "disabled"
import wandb
r = wandb.init()
def log(value, at): r.log({"val/accuracy": value})
""",
    "trackio": """
import os; os.environ["TRACKIO_DIR"] = "out"
import trackio
trackio.init(project="p", embed=False)
def log(value, at): trackio.log({"val/accuracy": value}, step=at)
""",
    "mlflow": """
import os; os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
import mlflow
mlflow.set_tracking_uri("file:out"); mlflow.start_run()
def log(value, at): mlflow.log_metric("val/accuracy", value, step=at); mlflow.log_metrics({"val/f1": value}, step=at)
""",
    "accelerate": """
import os; [os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
def log(value, at): accelerator.log({"val/accuracy": value}, step=at)
""",
    "transformers": """
from types import SimpleNamespace
from transformers.trainer_callback import CallbackHandler
handler = CallbackHandler([], None, None, None, None)
def log(value, at):
    state = SimpleNamespace(is_world_process_zero=True, global_step=at)
    handler.on_log(None, state, SimpleNamespace(), {"val/accuracy": value, "eval_runtime": 3.0, "train_runtime": 4.0})
""",
}


def recorded(folder) -> dict[str, list[tuple[int | None, object]]]:
    """The steps and values of what was tracked, by name."""
    found: dict[str, list[tuple[int | None, object]]] = {}
    for record in Records(folder.metrics(0)).read_all():
        if isinstance(record, Report) and record.is_tracked:
            for name in record.values.keys() - {"step"}:
                found.setdefault(name, []).append((record.step, record.values[name]))
    return found


@pytest.mark.parametrize("tracker", SCRIPTS)
def test_what_a_script_logs_to_a_tracker_is_recorded_at_its_step(tracker, folder, tmp_path):
    pytest.importorskip(tracker.partition(" ")[0])
    text = f"{TRAINING}{SCRIPTS[tracker]}\nstep(); log(0.5, 1); step(); log(0.75, 2)\n"

    code, _, err = run(folder, text, cwd=tmp_path)

    found = recorded(folder)
    assert (code, found["val/accuracy"]) == (0, [(1, 0.5), (2, 0.75)]), err
    assert found.keys() <= {"val/accuracy", "val/f1"}
    assert all(values == found["val/accuracy"] for values in found.values())


def test_lightning_logs_its_metrics_with_and_without_a_logger(folder, tmp_path):
    pytest.importorskip("lightning")
    text = """
import lightning as L, torch
class Model(L.LightningModule):
    def __init__(self): super().__init__(); self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, _):
        self.log("mine", float(self.global_step)); return self.net(batch[0]).square().mean()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=8)
quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
L.Trainer(max_epochs=1, logger=LOGGER, log_every_n_steps=1, accelerator="cpu", **quiet).fit(Model(), data)
"""
    for position, logger in enumerate(("False", "True")):
        folder.metrics(0).unlink(missing_ok=True)
        assert run(folder, text.replace("LOGGER", logger), cwd=tmp_path)[0] == 0
        assert recorded(folder)["mine"] == [(step + 1, float(step)) for step in range(4)], position


AS_IT_LIKES = """
import inspect, pickle, sys, threading, torch, traceback
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.writer import SummaryWriter as same
print(SummaryWriter is same, inspect.signature(SummaryWriter.add_scalar), SummaryWriter.add_scalar.__qualname__)
print(inspect.getsource(SummaryWriter.add_scalar)[:20], pickle.loads(pickle.dumps(SummaryWriter.add_scalar)).__name__)
class Mine(SummaryWriter):
    def add_scalar(self, tag, *args, **kwargs):
        print([each.function for each in inspect.stack()]); return super().add_scalar("my/" + tag, *args, **kwargs)
plain, mine = SummaryWriter("out"), Mine("mine")
print(plain.add_scalar("a", 1, 1), mine.add_scalar("b", torch.tensor(2.), global_step=1))
thread = threading.Thread(target=plain.add_scalar, args=("c", 3)); thread.start(); thread.join()
for arguments in ((), ("d", "no number", 1), ("e", torch.ones(2), 1), ("f", None)):
    try: plain.add_scalar(*arguments)
    except BaseException as error:
        print(type(error).__name__, error, [frame.name for frame in traceback.extract_tb(error.__traceback__)])
original = SummaryWriter.add_scalar
SummaryWriter.add_scalar = lambda self, tag, *rest: (print("patched"), original(self, tag, *rest))[1]
plain.add_scalar("g", 7, 1)
print(sorted(name for name in sys.modules if "labkit" in name) and "")
"""


def test_a_script_that_changes_its_tracker_sees_no_difference(folder, tmp_path):
    pytest.importorskip("tensorboard")
    (bare := tmp_path / "bare").mkdir()
    (bare / "train.py").write_text(AS_IT_LIKES)
    done = subprocess.run([sys.executable, "train.py"], cwd=bare, capture_output=True, text=True)

    code, out, _ = run(folder, AS_IT_LIKES, cwd=tmp_path)

    assert (code, out.splitlines()[:-1]) == (0, done.stdout.splitlines()[:-1])
    assert {name: [value for _, value in each] for name, each in recorded(folder).items()} == {
        "a": [1.0],
        "my/b": [2.0],
        "c": [3.0],
        "g": [7.0],
    }


def test_a_forked_child_and_a_script_without_torch_are_not_recorded(folder, tmp_path):
    pytest.importorskip("tensorboard")
    text = f"{TRAINING}{SCRIPTS['tensorboard']}\nimport os, sys\nstep(); log(0.5, 1)\n"
    text += "if not (child := os.fork()): log(9.0, 2); os._exit(0)\nos.waitpid(child, 0)\n"

    assert run(folder, text, cwd=tmp_path)[0] == 0
    assert recorded(folder)["val/accuracy"] == [(1, 0.5)]


def test_the_guest_awaits_the_modules_whose_calls_are_observed():
    assert tuple(trackers.CALLS) == guest.TRACKERS
    for module in guest.TRACKERS:
        if find_spec(module.partition(".")[0]) and module.startswith(("torch", "wandb", "trackio")):
            kind, methods = trackers.CALLS[module]
            code = (
                f"import importlib, json; c = getattr(importlib.import_module({module!r}), {kind!r}); print([*vars(c)])"
            )
            out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
            assert all(repr(name) in out for name in methods), module


class Writer:
    def log(self, data, step=None):
        return step

    def log_inside(self, data, step=None):
        handed_on = {name if name.startswith("eval") else f"train/{name}": value for name, value in data.items()}
        return self.log({**handed_on, "train/global_step": step, "own": 7}, step)


@pytest.fixture
def tracker(tmp_path, monkeypatch):
    """A tracker whose calls are observed, while labkit has counted `tracker.made` steps."""
    kind = type("Run", (), dict(vars(Writer)))
    module = type(sys)("a_tracker")
    module.Run = kind
    monkeypatch.setitem(trackers.CALLS, "a_tracker", ("Run", dict.fromkeys(("log", "log_inside"), trackers._values)))
    tracker = kind()
    tracker.made, tracker.path = 10, tmp_path / "metrics.jsonl"
    tracker.recorder = Recorder(tracker.path)
    tracker.trackers = Trackers(torch, tracker.recorder, lambda: tracker.made)
    tracker.trackers.hook(module)
    yield tracker
    os.close(tracker.recorder.file.descriptor)


def written(tracker):
    tracker.trackers.flush(everything=True)
    return [json.loads(line) for line in tracker.path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("made", "named", "step"), [(10, 10, 10), (10, 9, 9), (10, 11, 11), (10, 3, 10), (10, 640, 10), (10, None, 10)]
    + [(0, 7, 7), (0, None, 0), (10, float("nan"), 10), (10, np.int64(9), 9), (10, "9", 10)],
)  # fmt: skip
def test_a_number_is_placed_at_the_named_step_if_that_can_be_labkits(tracker, made, named, step):
    tracker.made = made

    assert tracker.log({"a": 1}, step=named) is named
    assert tracker.log({"b": 1, "step": named}) is None

    assert {record["step"] for record in written(tracker)} == {step}
    assert {name for record in written(tracker) for name in record} == {"k", "t", "step", "a", "b"}


@pytest.mark.parametrize(
    "value",
    [1, 1.0, np.float32(1), np.int8(1), np.array(1.0), np.array([1.0]), torch.tensor(1), torch.ones(1)]
    + [torch.nn.Parameter(torch.ones(())), torch.ones((), dtype=torch.bfloat16)],
    ids=repr,
)
@pytest.mark.filterwarnings("error")  # the script would see them
def test_numbers_of_any_kind_are_copied(tracker, value):
    tracker.log({"a": value})

    assert written(tracker)[0]["a"] == 1.0


@pytest.mark.parametrize(
    "value",
    [True, None, "1", [1], 1j, np.ones(2), torch.ones(2), torch.ones((), device="meta"), np.bool_(True), {"x": []}],
    ids=repr,
)
def test_what_is_no_number_is_passed_over(tracker, value):
    tracker.log({"a": value})

    assert written(tracker) == []
    assert tracker.recorder.dropped == 0


def test_numbers_of_a_mapping_within_are_named_as_wandb_names_them(tracker):
    tracker.log({"train": {"loss": 1, "step": 2}, "k": 3, "nan": float("nan")})

    (record,) = written(tracker)
    assert {name: record[name] for name in ("train.loss", "train.step", "k_", "nan")} == {
        "train.loss": 1.0,
        "train.step": 2.0,
        "k_": 3.0,
        "nan": "nan",
    }


def test_what_one_call_hands_to_another_is_taken_once(tracker):
    tracker.log_inside({"a": 1, "eval_a": 2})
    tracker.log({"train/a": 3})

    (record,) = written(tracker)
    assert {name: record[name] for name in record.keys() - {"k", "t", "step"}} == {
        "a": 1.0,
        "eval_a": 2.0,
        "own": 7.0,
        "train/a": 3.0,
    }


def test_numbers_of_one_step_are_one_record(tracker):
    for tracker.made in (1, 2):
        for name in "abc":
            tracker.log({name: tracker.made})

    assert [(record["step"], record["a"], record["b"], record["c"]) for record in written(tracker)] == [
        (1, 1, 1, 1),
        (2, 2, 2, 2),
    ]


def test_of_very_many_names_the_first_are_taken_and_the_first_left_out_is_named_once(tracker):
    for tracker.made in range(1, 300):
        for name in range(200):
            tracker.log({f"n{name}": tracker.made})

    records = written(tracker)
    assert [record["name"] for record in records if record["k"] == "untracked"] == [f"n{MOST_NAMES}"]
    assert {name for record in records for name in record} - {"k", "t", "step", "name"} == {f"n{i}" for i in range(64)}
    assert len(records) < 299  # thinned
    assert records[-1]["n0"] == 299.0


def test_a_call_that_fails_fails_as_before_and_the_next_one_is_taken(tracker):
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        tracker.log()
    tracker.log({"a": 1})

    assert written(tracker)[0]["a"] == 1.0


def test_threads_may_log_at_once(tracker):
    threads = [
        threading.Thread(target=lambda name=name: [tracker.log({name: i}) for i in range(100)]) for name in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    newest = {name: value for record in written(tracker) for name, value in record.items()}
    assert all(newest[name] == 99.0 for name in "abcd")


def step(number, loss, **more):
    seconds = [1.0, 1.0, 1.0]
    return {"k": "step", "t": float(number), "step": number, "n": 1, "seconds": seconds, "loss": loss, **more}


def tracked(t, number, **values):
    return {"k": "tracked", "t": t, "step": number, **values}


def read(folder, write_metrics, *records):
    write_metrics(0, {"k": "meta", "t": 0.0}, *records)
    history = RankHistory(0, folder.metrics(0))
    history.read_all()
    return history


def test_a_trackers_loss_does_not_replace_the_measured_one(folder, write_metrics):
    history = read(folder, write_metrics, step(1, 0.5), tracked(1.5, 1, loss=0.1), step(2, 0.25))

    assert history.series["loss"].last[0] == 0.5
    assert (history.latest["loss"], history.loss_of) == (0.25, "as passed to backward()")
    assert [row.get("loss") for row in rows(folder)] == [0.5, 0.25]


def test_a_trackers_loss_counts_where_there_is_none_that_was_measured(folder, write_metrics):
    several = {"loss_of": "several optimizers"}
    history = read(folder, write_metrics, step(1, None, **several), tracked(1.5, 1, loss=0.1))

    assert (history.latest["loss"], history.loss_of) == (0.1, "")
    assert [row["loss"] for row in rows(folder)] == [0.1]


def test_names_that_say_something_of_the_run_say_nothing_when_they_are_a_trackers(folder, write_metrics):
    history = read(folder, write_metrics, step(4, 0.5), tracked(4.5, 9, total_steps=7, start_step=100, mine=1.0))

    assert history.step == 4
    assert history.values == {"step": 9, "mine": 1.0}


@pytest.mark.parametrize("is_late", [False, True])  # on a GPU the loss is written after what was tracked
def test_the_loss_under_another_name_is_not_charted_again(is_late, folder, write_metrics):
    pairs = [
        [step(i, 1 / i), tracked(i + 0.5, i - 1, objective=1 / i, other=1 / i if i < 3 else 9.0)] for i in range(1, 8)
    ]
    history = read(folder, write_metrics, *(record for pair in pairs for record in (pair[::-1] if is_late else pair)))

    assert history.scalars.keys() == {"other"}
    assert history.values["objective"] == 1 / 7


def test_the_view_names_the_first_name_that_is_not_recorded(folder, write_metrics):
    assert read(folder, write_metrics, {"k": "untracked", "t": 1.0, "name": "grad/9"}).untracked == "grad/9"
