"""Numbers that a script only prints: when they were printed, what of them is charted, and which are offered."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

import labkit
from labkit.launcher.sampler import LogSizes
from labkit.rank_files import LOG_SIZES
from labkit.record import Glance, RunReader, State, rows
from labkit.record.log_numbers import LAST_SECONDS, LogNumbers, numbers_in
from labkit.view.live.offers import in_log
from labkit.view.live.run_charts import Look, run_charts
from labkit.view.live.verdict import verdict


@pytest.fixture
def log(folder):
    """`log(t, text)`: what rank 0 prints, seen at this time; not yet at `None`."""
    folder.rank(0).mkdir(exist_ok=True)
    sizes = folder.rank(0) / LOG_SIZES

    def write(t, text="", stream="stdout"):
        for each in ("stdout", "stderr"):
            with folder.log(0, each).open("a") as file:
                file.write(text if each == stream else "")
        seen = {each: folder.log(0, each).stat().st_size for each in ("stdout", "stderr")}
        if t is not None:
            with sizes.open("a") as file:
                file.write(json.dumps({"t": t, **seen}) + "\n")

    return write


@pytest.fixture
def ended(folder, write_metrics):
    """A run of one step that is over."""
    content = {"format": 1, "id": folder.id, "name": "demo", "world_size": 1, "parameters": {}, "args": []}
    folder.manifest.write_text(json.dumps(content))
    State("succeeded", 0.0, ended=1.0).write(folder)
    write_metrics(0, {"k": "meta", "t": 0.0}, step(1))
    return labkit.attach(folder.path)


def step(number):
    seconds = [1.0, 1.0, 1.0]
    return {"k": "step", "t": float(number), "step": number, "n": 1, "seconds": seconds, "loss": 1 / number}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("epoch 3 val_acc: 0.93", 0.93),
        ("val_acc=93%", 93.0),
        ("{'loss': 1.0, 'val_acc': 0.93, 'epoch': 2}", 0.93),
        ('{"val_acc": 9.3e-1}', 0.93),
        ("INFO val_acc 0.93, done", 0.93),
        ("Val_Acc = .93.", 0.93),
        ("val_acc: tensor(0.9300, device='cuda:0')", 0.93),
        ("val_acc: -inf", float("-inf")),
        ("val_acc: 123,456.7", 123456.7),
        ("val_acc -1,234,567, done", -1234567.0),
        ("val_acc: 1,234.5e3", 1234500.0),
        ("val_acc: 0,93", None),  # a decimal comma, or two numbers
        ("val_acc: 1.234,5", None),
        ("val_acc: 12,3456", None),
        ("val_acc: 1,234,56", None),
        ("my_val_acc: 0.93", None),
        ("val_acc/top5: 0.93", None),
        ("val_acc: 1.2.3", None),
        ("val_acc: 3GiB", None),
        ("val_acc is computed", None),
    ],
)
def test_the_number_after_a_name_is_its_value(log, folder, line, value):
    log(1.0, f"{line}\n")

    assert [each.value for each in LogNumbers(folder.rank(0), "val_acc").poll()] == ([] if value is None else [value])


def test_a_line_has_the_time_at_which_the_log_was_first_seen_to_have_it(log, folder):
    numbers = LogNumbers(folder.rank(0), "acc")
    log(1.0, "acc 1\nacc 2\nac")
    log(2.0, "c 3\n")
    log(2.5, "acc 4\r", stream="stderr")
    log(None, "acc 5\n")

    assert [(line.t, line.since, line.value) for line in numbers.poll()] == [
        (1.0, 0.0, 1.0),
        (1.0, 0.0, 2.0),
        (2.0, 1.0, 3.0),
        (2.5, 2.0, 4.0),
    ]
    assert numbers.poll() == []
    assert [line.t for line in numbers.poll(everything=True)] == [2.5 + LAST_SECONDS]


def test_a_log_without_the_metric_is_read_in_bounded_memory(log, folder):
    numbers = LogNumbers(folder.rank(0), "acc")
    for t in range(1, 100):
        log(float(t), "nothing\n")
        numbers.poll()
    log(100.0, "acc 1\n")

    assert {len(stream.sizes) for stream in numbers._streams.values()} <= {0, 1}
    assert [(line.t, line.since) for line in numbers.poll()] == [(100.0, 99.0)]


def test_a_line_of_a_log_that_nobody_looked_at_has_no_time(log, folder):
    log(None, "acc 1\n")

    assert LogNumbers(folder.rank(0), "acc").poll(everything=True) == []


def test_what_the_owner_chooses_is_in_the_charts_and_tables_of_every_later_view(log, folder, write_metrics):
    write_metrics(0, {"k": "meta", "t": 0.0}, *map(step, range(1, 9)))
    write_metrics(1, {"k": "meta", "t": 0.0}, *map(step, range(1, 9)))
    opened = RunReader(folder)
    opened.read_all()
    for t in (2, 4, 6):
        log(t + 0.5, f"val_acc: 0.{t}\nval_loss 1\n")

    folder.describe_metric("val_acc", from_log=True)
    folder.describe_metric("val_acc", better="higher")

    for reader in (opened.read_all(), RunReader(folder).read_all()):
        assert [(x, last) for x, *_, last in reader.ranks[0].scalars["val_acc"].points()] == [
            (pytest.approx(t + 0.5, abs=0.1), t / 10) for t in (2, 4, 6)
        ]
        assert reader.ranks[0].figures == {"val_acc": 0.6}
        assert "val_acc" not in reader.ranks[1].scalars
        assert in_log(reader).startswith("val_loss is in the log; chart it by ")
    assert {row["step"]: row["val_acc"] for row in rows(folder) if "val_acc" in row} == {2: 0.2, 4: 0.4, 6: 0.6}
    glance = Glance.read(folder)
    assert (glance.newest["val_acc"], glance.value("val_acc", "higher")) == (0.6, 0.6)
    assert Glance.read(folder, only="val_acc").newest == {"val_acc": 0.6}


@pytest.mark.parametrize(
    ("named", "row"),
    [("step 3", 3), ("global_step: 4", 4), ("iter [2/100]", 2), ("step 1", 1), ("step 3,5", 4)]
    + [("step 12", 4), ("epoch 1", 4)],  # micro-batches, or none: the last step that was recorded by then
)  # fmt: skip
def test_a_line_is_in_the_row_of_the_step_that_it_names_if_that_was_made_then(log, folder, write_metrics, named, row):
    write_metrics(0, {"k": "meta", "t": 0.0}, *map(step, range(1, 9)))
    log(1.5)
    log(4.5, f"{named} acc: 0.5\n")
    folder.describe_metric("acc", from_log=True)

    assert [each["step"] for each in rows(folder) if "acc" in each] == [row]


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        (["acc 1", "acc 2", "acc 3"], [4, 6, 8]),  # over the steps of t from 3 to 8
        (["acc 1 loss 9", "acc 2 loss 8"], [5, 8]),
        (["step 7 acc 1", "acc 2"], [7, 8]),
        (["step 7 acc 1", "step 7 acc 2"], [7, 7]),
        ([f"acc {value}" for value in range(1, 10)], [3, 3, 4, 4, 5, 6, 6, 7, 8]),
    ],
)
def test_each_value_between_two_looks_at_the_log_has_a_row(log, folder, write_metrics, lines, steps):
    write_metrics(0, {"k": "meta", "t": 0.0}, *map(step, range(1, 9)))
    log(2.5)
    log(8.5, "\n".join(lines) + "\n")
    folder.describe_metric("acc", from_log=True)

    table = [*rows(folder)]

    assert sorted((row["acc"], row["step"]) for row in table if "acc" in row) == [*enumerate(steps, 1)]
    assert [row["step"] for row in table if "loss" in row] == [*range(1, 9)]
    assert all("time" in row for row in table)
    assert Glance.read(folder).newest["acc"] == len(lines)


def test_each_value_of_a_rank_without_steps_has_a_row(log, folder, write_metrics):
    write_metrics(0, {"k": "meta", "t": 0.0})
    log(1.0, "acc 1\nacc 2\n")
    folder.describe_metric("acc", from_log=True)

    assert [(row["step"], row["acc"]) for row in rows(folder)] == [(0, 1.0), (0, 2.0)]


@pytest.mark.parametrize(
    ("t", "printed", "values"),
    [
        (1.0, "val_acc 0.5 (best val_acc 0.7)\nval_acc 0.6\nval_acc 0.", [0.5, 0.6]),
        (None, "val_acc 0.5\n", []),  # nobody looked at the log
    ],
)
def test_the_list_of_runs_has_the_values_of_the_table(log, folder, write_metrics, t, printed, values):
    write_metrics(0, {"k": "meta", "t": 0.0}, *map(step, range(1, 9)))
    log(t, printed)
    folder.describe_metric("val_acc", from_log=True)

    assert [row["val_acc"] for row in rows(folder) if "val_acc" in row] == values
    assert Glance.read(folder).extremes == ({"val_acc": (min(values), max(values))} if values else {})


@pytest.mark.parametrize(("named", "place"), [("step {}", "step 3"), ("", "about step 8")])
def test_the_best_line_is_at_the_step_that_it_names(log, folder, write_metrics, named, place):
    write_metrics(0, {"k": "meta", "t": 0.0}, *map(step, range(1, 31)))
    log(0.5)
    losses = [3, 2, 1, 1, 4, 5, 6, 7, 8, *[9] * 21]
    for second in (8.5, 16.5, 24.5, 30.5):
        numbers = range(int(second) - 7 if second < 30 else 25, int(second) + 1)
        log(second, "".join(f"{named.format(n)} val_fid: {losses[n - 1]}\n" for n in numbers))
    folder.describe_metric("val_fid", from_log=True)

    reader = RunReader(folder).read_all()

    (sentence,) = verdict(reader, State("running", 0.0))
    assert sentence.startswith(f"val_fid was best at {place}: 1, no better")
    (chart,) = (chart for chart in run_charts(reader, Look(axis="step")) if chart.title == "fid")
    assert f"step {chart.best_point()[0]:.0f}" == place.removeprefix("about ")


def test_the_lines_of_an_attempt_are_placed_in_it(log, folder, write_metrics):
    folder.describe_metric("acc", from_log=True)
    write_metrics(0, {"k": "meta", "t": 0.0, "time": 1000.0}, step(1))
    log(1.5, "acc: 1\n")
    second = folder.attempt(2)
    second.rank(0).mkdir(parents=True)
    second.metrics(0).write_text(json.dumps({"k": "meta", "t": 100.0, "time": 1010.0}) + "\n")
    second.log(0).write_text("acc: 2\n")
    (second.rank(0) / LOG_SIZES).write_text('{"t": 102.0, "stdout": 7, "stderr": 0}\n')

    history = RunReader(folder).read_all().ranks[0]

    (first_x, *_, first), (second_x, *_, last) = history.scalars["acc"].points()
    assert (first, last) == (1.0, 2.0)
    assert (first_x, second_x) == (pytest.approx(1.5, abs=0.1), pytest.approx(3.0, abs=0.1))


def test_a_name_is_found_in_three_lines_of_a_log_of_any_kind():
    text = "\rVal Acc: 0.1 loss=3\rVal Acc: 0.2\n{'Val Acc': 0.3, 'Val Acc': 0.4} loss: 2 epoch 1\n"

    assert numbers_in(text, 3) == {"Val Acc": [Decimal("0.1"), Decimal("0.2"), Decimal("0.3")]}
    assert set(numbers_in(text, 2)) == {"Val Acc", "loss"}


@pytest.mark.parametrize(
    ("printed", "offered"),
    [
        ("step 3 loss 0.4 lr 0.1 grad_norm 2.0 time 3", ""),
        ("train_loss: 0.4", ""),
        ("eval_runtime: 0.4", ""),
        ("Error: 404", ""),
        ("val_loss: 0.4", "val_loss is"),
        ("top1=0.4", "top1 is"),
        ("Train Acc: 0.4 Val Acc: 0.3", "Val Acc and Train Acc are"),
        ("acc 1 f1 2 val_x 3 bleu 4", "val_x, acc and f1 are"),
        ("val/reported 0.4", ""),
    ],
)
def test_results_that_are_only_printed_are_offered(log, folder, write_metrics, printed, offered):
    report = {"k": "report", "t": 2.0, "val_reported": 0.4}
    write_metrics(0, {"k": "meta", "t": 0.0}, step(1), report)
    log(1.0, f"{printed}\n" * 2)
    assert in_log(RunReader(folder).read_all()) == ""

    log(2.0, f"{printed}\n")

    assert in_log(RunReader(folder).read_all()).partition(" in the log")[0] == offered


@pytest.mark.parametrize(("ui", "run"), [("text", 'labkit.attach("demo-0a1b")'), ("static", "run")])
def test_a_terminal_is_told_how_to_get_at_the_run(log, folder, write_metrics, monkeypatch, ui, run):
    monkeypatch.setenv("LABKIT_UI", ui)
    write_metrics(0, {"k": "meta", "t": 0.0}, step(1))
    log(1.0, "acc 1\n" * 3)

    assert (
        in_log(RunReader(folder).read_all()) == f'acc is in the log; chart it by `{run}.metric("acc", from_log=True)`'
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nope", "has ended and 'nope' is not in its log; there are: val_acc"),
        ("val_ac", "has ended and 'val_ac' is not in its log; did you mean 'val_acc'? There are: val_acc"),
        ("val_acc", ""),
    ],
)
def test_a_name_that_is_not_in_the_log_is_said_to_be_missing_there(log, ended, capsys, name, said):
    log(1.0, "val_acc 1\n" * 3)

    ended.metric(name, from_log=True)

    assert capsys.readouterr().out.strip().removeprefix(ended.id).strip() == said


def test_a_name_in_a_log_that_nobody_looked_at_is_said_to_have_no_time(log, ended, capsys):
    log(None, "val_acc 1\n" * 3)

    ended.metric("val_acc", from_log=True)

    assert (
        "before labkit looked at its log, so that it is not known when 'val_acc' was printed" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("printed", "offered"),
    [
        ("fid {:.2f}", ""),
        ("FID: {:.1e}", ""),
        ("val_fid {:.2f}", ""),
        ("fid 0.5{:.0f}", "fid is"),  # of the training
        ("test_fid {:.2f}", "test_fid is"),
    ],
)
def test_what_is_charted_under_a_longer_name_is_not_offered(log, folder, write_metrics, printed, offered):
    values = [0.1234, 0.1188, 0.0951]
    reports = [{"k": "tracked", "t": float(t), "step": t, "val/fid": value} for t, value in enumerate(values, 1)]
    write_metrics(0, {"k": "meta", "t": 0.0}, step(1), *reports)
    log(4.0, "".join(f"{printed.format(value)}\n" for value in [*values, 0.08]))  # the last one is not recorded yet

    assert in_log(RunReader(folder).read_all()).partition(" in the log")[0] == offered


def test_the_end_of_a_long_log_is_all_that_is_looked_at_for_offers(log, folder, write_metrics):
    write_metrics(0, {"k": "meta", "t": 0.0}, step(1))
    log(1.0, "val_acc 1\n" * 3 + "nothing\n" * 10_000)

    assert in_log(RunReader(folder).read_all()) == ""


@pytest.mark.parametrize(("node", "notes"), [(None, True), (0, True), (1, False)])
def test_the_sampler_notes_how_long_the_logs_of_rank_0_are_when_they_have_grown(folder, node, notes):
    sizes = LogSizes(folder, folder if node is None else folder.node(node))
    sizes.note()  # there is no rank yet
    folder.rank(0).mkdir()
    for text in ("a\n", "", "bc\n"):
        with folder.log(0).open("a") as file:
            file.write(text)
        folder.log(0, "stderr").touch()
        sizes.note()

    file = folder.rank(0) / LOG_SIZES
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    assert [(line["stdout"], line["stderr"]) for line in lines] == ([(2, 0), (5, 0)] if notes else [])
