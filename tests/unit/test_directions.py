"""Whether lower or higher values of a metric are better: what is known of it, from where, and what follows."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import labkit
from labkit import LabError
from labkit.checking import facts_of
from labkit.metric_names import Directions, agreed, better, parted
from labkit.record import RunReader, State
from labkit.view.live.run_charts import Look, run_charts
from labkit.view.live.verdict import learning

LOWER = """
val_loss val_ppl val_nll val_bpb val_loss_ce val_fid eval/cross_entropy val_mape test_logloss validation_perplexity
val_error_rate val_latency dev_wer val_rmse nll bpb bpc bits_per_byte ece valLoss testloss val/loss_dice val_MSELoss
val/latency_ms loss/val val_negative_log_likelihood val_kl_loss val_loss_epoch eval_loss/dataloader_idx_0 fpr95
val_brier_score top5_error
"""
HIGHER = """
accuracy acc top1 top5 f1 auc auroc map miou iou dice bleu rouge r2 recall precision exact_match psnr ssim acc1
metrics/mAP50-95(B) rougeL rewards/accuracies val_F1Score recall@5 val/mIoU roc_auc dice_coefficient
mean_average_precision acc_norm,none test_explained_variance
"""
UNKNOWN = """
score reward val_score entropy kl grad_norm lr count temperature loss_scale accuracy_std error_top1 val_answer val_power
eval_runtime learning_rate best_step val_quality error_count latency_f1 val_loss_ratio neg_log_loss test_samples
acc_stderr,none accuracy_drop eval_samples_per_second
"""


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        (name, answer)
        for names, answer in ((LOWER, "lower"), (HIGHER, "higher"), (UNKNOWN, None))
        for name in names.split()
    ],
)
def test_the_name_of_a_metric_tells_which_values_are_better_or_it_is_unknown(name, answer):
    assert better(name) == answer


def test_what_the_owner_says_comes_before_the_script_and_the_script_before_the_name():
    directions = Directions({"val_x": "lower"}, {"x": "higher", "loss": "higher", "test_y": "lower"})

    assert [directions.better(name) for name in ("val_x", "x", "val/x", "val_loss", "y", "accuracy", "val_z")] == [
        *("lower", "lower", "lower", "higher", "lower", "higher"),
        None,
    ]


def test_of_several_runs_one_may_know_and_none_may_contradict():
    silent, lower, higher = Directions(), Directions({"x": "lower"}), Directions({"x": "higher"})

    assert [agreed(runs, "val_x") for runs in ([silent, lower], [lower, higher], [silent])] == ["lower", None, None]


@pytest.fixture
def run(folder):
    """`run(name, values, …)`: a run that has reported a metric every 100 steps."""

    def make(name, values, manifest=(), state="running"):
        content = {"format": 1, "id": folder.id, "name": "lm", "world_size": 1, "parameters": {}, "args": []}
        folder.manifest.write_text(json.dumps(content | dict(manifest)))
        State(state, time.time(), ended=time.time() if state != "running" else None).write(folder)
        folder.rank(0).mkdir(parents=True, exist_ok=True)
        records = [{"k": "meta", "v": 1, "t": 0.0, "time": time.time(), "rank": 0, "world_size": 1}]
        records += [{"k": "report", "t": float(n), "step": 100 * n, name: value} for n, value in enumerate(values, 1)]
        folder.metrics(0).write_text("".join(json.dumps(record) + "\n" for record in records))
        return labkit.attach(folder.path)

    return make


def said_of(folder):
    """What the verdict says of learning, and the point that the chart circles."""
    reader = RunReader(folder).read_all()
    (chart,) = [chart for chart in run_charts(reader, Look()) if chart.evaluated]
    circled = chart.best_point()
    return learning(list(reader.ranks.values()), State.read(folder), folder.directions()), circled and circled[1]


@pytest.mark.parametrize("name", ["val_ppl", "val_nll", "val_loss", "val_error_rate", "val_fid"])
def test_a_metric_that_falls_and_should_is_still_improving(run, folder, name):
    run(name, [100.0 / n for n in range(1, 9)])

    assert said_of(folder) == (f"{name} is still improving: 12.5, the best so far (20 three evaluations before)", 12.5)


def test_nothing_is_best_while_nobody_says_what_is_better(run, folder):
    one = run("val_quality", [3.0, 9.0, 6.0, 5.0, 4.0])

    assert said_of(folder) == ("", None)
    assert "best" not in repr(labkit.runs(runs_dir=folder.path.parent))
    assert "4" in repr(labkit.runs(runs_dir=folder.path.parent))
    assert "best" not in str(labkit.compare([one])) and "★" not in str(labkit.compare([one]))

    labkit.attach(folder.path).metric("val_quality", better="higher")  # another process

    assert said_of(folder) == ("val_quality was best at step 200: 9, no better in 3 evaluations since", 9.0)
    assert "best val_quality" in repr(labkit.runs(runs_dir=folder.path.parent))
    assert "best val_quality" in str(labkit.compare([one]))

    one.metric("quality", better="lower")
    one.metric("val_quality", better="lower")

    assert said_of(folder)[1] == 3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "val_x", "better": "smaller"}, "better must be 'lower' or 'higher', got 'smaller'"),
        ({"name": "val_x"}, "says nothing of it; add better"),
        ({"name": 3, "better": "lower"}, "name must be the name of a reported value"),
        ({"name": "", "better": "lower"}, "name must be the name of a reported value"),
    ],
)
def test_what_says_nothing_of_a_metric_is_refused(run, folder, arguments, message):
    with pytest.raises(LabError, match=message):
        run("val_x", [1.0]).metric(**arguments)

    assert not folder.metric_options.exists()


def test_only_a_run_that_is_over_can_have_left_out_a_metric(run, capsys):
    run("val_x", [1.0]).metric("val_y", better="lower")

    assert not capsys.readouterr().out

    ended = run("val_x", [1.0], state="succeeded")
    ended.metric("test_x", better="lower")  # as good as its own name

    assert not capsys.readouterr().out

    ended.metric("val_y", better="lower")

    assert "has ended and never reported 'val_y'; did you mean 'val_x'?" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[]", "{", '{"val_x": 3}', '{"val_x": {"better": "smaller"}}'])
def test_a_damaged_file_says_nothing(run, folder, text):
    one = run("val_x", [1.0])
    folder.metric_options.write_text(text)

    assert folder.directions().better("val_x") is None

    one.metric("val_x", better="lower")
    one.metric("val_y", better="higher")

    assert [folder.directions().better(name) for name in ("val_x", "val_y")] == ["lower", "higher"]


@pytest.mark.parametrize(
    "manifest",
    [
        {"sweep": {"id": "s", "point": 0, "better": {"val_x": "lower"}}},
        {"facts": {"better": {"x": "lower"}}},
        {"parameters": {"best": "x", "best_is": "lowest"}},
    ],
)
def test_a_sweep_the_script_and_the_options_of_the_extra_validate_say_what_is_better(run, folder, manifest):
    run("val_x", [1.0, 3.0, 2.0], manifest)

    assert said_of(folder)[1] == 1.0


SCRIPTS = {
    'EarlyStopping(monitor="val_x", mode="min")': {"val_x": "lower"},
    'EarlyStopping("val_x", mode="max")': {"val_x": "higher"},
    'pl.callbacks.ModelCheckpoint(monitor="val/x", mode="max", save_top_k=1)': {"val/x": "higher"},
    'NAME = "val_x"\nModelCheckpoint("here", monitor=NAME, mode="min")': {"val_x": "lower"},
    'ModelCheckpoint("here", monitor="val_x")': {},  # the default is not said
    'EarlyStopping(monitor="val_x", mode="auto")': {},  # Keras
    'EarlyStopping(monitor="val_x", mode=mode)': {},
    'EarlyStopping(monitor="val_x", mode="min")\nModelCheckpoint(monitor="val_x", mode="max")': {},
    'open(name, mode="min")': {},
    'plateau = ReduceLROnPlateau(optimizer, "max")\nplateau.step(val_x)': {"val_x": "higher"},
    'self.plateau = ReduceLROnPlateau(optimizer, mode="min")\nself.plateau.step(seen["val_x"])': {"val_x": "lower"},
    'plateau = ReduceLROnPlateau(optimizer, mode="min")\nplateau.step(metrics=val_x.item())': {"val_x": "lower"},
    'plateau = ReduceLROnPlateau(optimizer, mode="max")\nplateau.step(-val_x)': {},
    'plateau = ReduceLROnPlateau(optimizer, mode="max")\nother.step(val_x)': {},
    "plateau = ReduceLROnPlateau(optimizer)\nplateau.step(val_x)": {},
    'x = {"scheduler": ReduceLROnPlateau(optimizer, mode="max"), "monitor": "val_x"}': {"val_x": "higher"},
    'p = ReduceLROnPlateau(o, mode="max")\nx = {"optimizer": o, "lr_scheduler": p, "monitor": "x"}': {"x": "higher"},
    'x = {"scheduler": StepLR(optimizer), "monitor": "val_x"}': {},
    'TrainingArguments(metric_for_best_model="x", greater_is_better=False)': {"x": "lower"},
    'Seq2SeqTrainingArguments("here", metric_for_best_model="eval_x", greater_is_better=True)': {"eval_x": "higher"},
    'TrainingArguments(metric_for_best_model="x")': {"x": "higher"},  # the rule of Hugging Face
    'TrainingArguments(metric_for_best_model="x_loss", greater_is_better=None)': {"x_loss": "lower"},
    'TrainingArguments(metric_for_best_model="perplexity")': {"perplexity": "lower"},  # whatever its rule
    'TrainingArguments(metric_for_best_model="x", greater_is_better=flag)': {},
    'TrainingArguments(metric_for_best_model="x", **options)': {},
    "TrainingArguments(load_best_model_at_end=True)": {},
}


@pytest.mark.parametrize(("text", "answers"), SCRIPTS.items())
def test_the_text_of_a_script_says_which_values_are_better(text, answers):
    assert facts_of(text).better == answers


@pytest.fixture(scope="module")
def extra():
    """The names in the extra `validate`, which cannot import labkit."""
    names = {"report": lambda **values: None, "notes": {}}
    exec(Path(__file__).parents[2].joinpath("scripts/extras/validate.py").read_text(), names)
    return SimpleNamespace(**names)


def test_the_extra_validate_agrees_with_labkit(extra):
    def lowest(name, best_is=None):
        extra.notes.clear()
        measured = iter([1.0, 0.5])
        args = SimpleNamespace(best=name, best_is=best_is, patience=0, validate_every=1)
        for step in (1, 2):
            extra.validate(step, 9, lambda: {f"test_{name}": next(measured)}, args)
        return extra.notes["best"] == 0.5

    names = [*extra.LOW, *extra.HIGH, "loss_dice", "bleu_error", "token/accuracy", "word_perplexity"]
    assert {name: lowest(name) for name in names} == {name: better(name) == "lower" for name in names}
    assert None not in map(better, names)
    assert (lowest("loss", "highest"), lowest("quality", "lowest")) == (False, True)
    with pytest.raises(SystemExit, match="is a low or a high quality good"):
        lowest("quality")


def test_labkits_own_scripts_say_nothing_of_their_metrics():
    script = labkit.Script.load("ddp", "checkpoints", "validate")

    assert facts_of(str(script)).better == {}


@pytest.mark.parametrize(
    ("name", "data", "metric"),
    [
        ("val_accuracy", "val", "accuracy"),
        ("val/top1_accuracy", "val", "top1_accuracy"),
        ("Val Acc", "val", "acc"),
        ("Loss/train", "train", "loss"),
        ("metrics/Accuracy/test", "test", "metrics/Accuracy"),
        ("train_loss_step", "train", "loss"),
        ("train_acc_step", "train", "acc_step"),
        ("values", "", "values"),
        ("lr/group", "", "lr/group"),
        ("test", "", "test"),
    ],
)
def test_a_name_says_on_which_data_it_was_measured(name, data, metric):
    assert parted(name) == (data, metric)
