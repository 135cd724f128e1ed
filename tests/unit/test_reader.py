import math

import pytest

from labkit import words
from labkit.record import RunReader
from labkit.record.history import KEPT_NAMES, KEPT_REPORTS, RankHistory
from labkit.record.table import rows

META = {"k": "meta", "t": 100.0, "rank": 0, "device": "cpu"}


def step(t, number=1, n=1, seconds=(1.0, 1.0, 1.0), **more):
    return {"k": "step", "t": t, "step": number, "n": n, "seconds": list(seconds), **more}


def report(t, **values):
    return {"k": "report", "t": t, **values}


@pytest.fixture
def history(folder, write_metrics):
    def read(*records):
        write_metrics(0, *records)
        return RunReader(folder).read_all().ranks[0]

    return read


def test_totals_are_sums_over_all_steps(history):
    phases = {"input": 0.25, "forward": 0.5, "backward": 1.0, "optimizer": 0.125, "communication": 0.0625}

    read = history(
        META,
        step(101, 2, n=2, seconds=(2.0, 0.5, 1.5), samples=64, **phases),
        step(102, 3, seconds=(4.0, 4.0, 4.0), samples=32, **phases),
    )

    counted = {"samples": 96, "counted_steps": 3, "counted_seconds": 6}
    assert read.totals == {
        "steps": 3,
        "seconds": 6,
        "restarts": 0,
        **counted,
        **{name: 2 * s for name, s in phases.items()},
    }
    assert read.step == 3


@pytest.mark.parametrize("reports", [0, 400])
def test_the_ends_of_the_records_tell_the_step_and_how_it_ended(folder, write_metrics, reports):
    steps = [step(101 + n, n + 1, loss=1.0) for n in range(2000)]
    after = [report(2200 + n, val_loss=n / 7) for n in range(reports)]
    write_metrics(0, META, report(100, start_step=300), *steps, *after, {"k": "end", "t": 3000, "outcome": "raised"})

    history = RankHistory(0, folder.metrics(0))
    history.read_ends()

    assert history.step == 2300
    assert history.end.outcome == "raised"
    assert (history.totals["steps"] < 2000) == (reports == 0)


def test_series_are_over_seconds_since_the_ranks_first_record(history):
    read = history(META, step(101.0, loss=3.0, samples=8), step(109.0, 2, loss=2.0, samples=16))

    assert read.series["loss"].origin == 1.0
    assert [last for *_, last in read.series["loss"].points()] == [3.0, 2.0]
    assert [last for *_, last in read.series["throughput"].points()] == [8.0, 16.0]
    assert read.seen == 9.0


def test_the_extremes_of_a_reported_value_count_every_finite_report(history):
    values = [5.0, *([1.0] * KEPT_REPORTS), "nan", "inf", 2]
    read = history(META, *(report(101 + i, step=i, f1=value) for i, value in enumerate(values)))

    assert read.extremes["f1"] == (1.0, 5.0)
    assert read.values["f1"] == 2


def test_step_time_is_drawn_by_its_slowest_and_reported_by_its_mean(history):
    read = history(META, step(101, 4, n=4, seconds=(2.0, 0.1, 1.5)))

    assert read.series["step_seconds"].points()[0][3] == 1.5
    assert read.latest["step_seconds"] == 0.5


def test_the_scripts_own_loss_wins_over_the_probes(history):
    read = history(META, step(101, loss=9.0), report(102, step=1, loss=3.0), step(103, 2, loss=8.0))

    assert [last for *_, last in read.series["loss"].points()] == [3.0]
    assert read.latest["loss"] == 3.0


def test_a_probes_loss_that_was_lost_is_forgotten_once_the_script_reports_its_own(history):
    read = history(META, step(101, loss="inf"), report(102, step=1, loss=3.0))

    assert read.lost_at is None


def test_the_probes_loss_stands_when_the_script_reports_none(history):
    read = history(META, step(101, loss=9.0), report(102, step=1, accuracy=0.5))

    assert read.latest["loss"] == 9.0


@pytest.mark.parametrize("record", [step(101, loss="nan"), report(101, loss="nan"), report(101, loss=math.nan)])
def test_a_loss_that_is_not_a_number_is_no_point_and_its_step_is_kept(history, record):
    read = history(META, record)

    assert math.isnan(read.latest["loss"])
    assert read.series["loss"].points() == []
    assert read.lost_at == read.step


def test_an_infinite_loss_is_read_as_such(history):
    assert history(META, step(101, loss="inf")).latest["loss"] == math.inf


def test_memory_is_the_allocators_on_cuda_and_the_resident_set_on_the_cpu(history):
    read = history({**META, "device": "cuda"}, step(101, allocated=10, reserved=30, peak=20, rss=99))

    assert (read.memory_name, read.latest["memory"], read.memory_peak) == ("allocated", 10.0, 20.0)


def test_on_the_cpu_the_highest_resident_set_is_the_peak(history):
    read = history(META, step(101, rss=50), step(102, rss=40))

    assert (read.memory_name, read.latest["memory"], read.memory_peak) == ("resident set", 40.0, 50.0)


def test_what_a_rank_holds_and_how_it_ended_are_kept(history):
    read = history(
        META,
        {"k": "model", "t": 101, "parameters": 4, "gradients": 4, "optimizer": 8},
        {"k": "end", "t": 102, "step": 7, "outcome": "finished", "dropped": 0},
    )

    assert read.held == {"parameters": 4, "gradients": 4, "optimizer": 8}
    assert read.end.outcome == "finished"


def test_the_newest_value_of_everything_reported_is_kept(history):
    read = history(META, report(101, epoch=0, total_steps=10), report(102, epoch=1))

    assert read.values == {"epoch": 1, "total_steps": 10}
    assert list(read.reports) == [{"epoch": 0, "total_steps": 10}, {"epoch": 1}]


def test_reports_are_kept_in_bounded_memory(history):
    read = history(META, *(report(101, i=i) for i in range(KEPT_REPORTS + 5)))

    assert len(read.reports) == KEPT_REPORTS
    assert read.reports[-1] == {"i": KEPT_REPORTS + 4}


@pytest.mark.parametrize("kind", ["of the future", None, 3, ["step"]])
def test_records_of_an_unknown_kind_are_ignored(history, kind):
    read = history(META, {"k": kind, "t": 101, "step": 9, "loss": 1.0})

    assert (read.step, read.latest, read.totals["steps"]) == (0, {}, 0)


def test_records_without_a_header_are_read_all_the_same(history):
    read = history(step(50, loss=1.0), step(51, 2, loss=2.0))

    assert (read.step, read.device, read.totals["steps"]) == (2, "?", 2)


def test_lines_that_are_no_records_are_counted_over_all_ranks(folder, write_metrics):
    write_metrics(0, META, b"torn\n", step(101))
    write_metrics(1, META, b"\xff\n", b"[]\n")

    reader = RunReader(folder).read_all()

    assert reader.undecodable == 3
    assert reader.ranks[0].step == 1


def test_polling_reads_only_what_is_new_and_finds_new_ranks(folder, write_metrics):
    reader = RunReader(folder)

    assert not reader.poll()
    write_metrics(0, META, step(101))
    assert reader.poll()
    assert not reader.poll()
    write_metrics(1, META, step(101, 5))
    assert reader.poll()
    assert {rank: history.step for rank, history in reader.ranks.items()} == {0: 1, 1: 5}
    assert reader.ranks[0].totals["steps"] == 1


@pytest.mark.parametrize(
    "record",
    [
        {"k": "step", "t": 101, "step": 1, "seconds": 1.0},
        {"k": "step", "t": 101, "step": 1, "seconds": [1.0]},
        {"k": "step", "t": 101, "step": "nan", "seconds": [1, 1, 1]},
        {"k": "step", "t": 101, "step": "inf", "seconds": [1, 1, 1]},
        {"k": "report", "t": 101, "loss": 10**400},
    ],
    ids=["seconds alone", "one of three", "step nan", "step inf", "huge loss"],
)
def test_a_record_of_an_unexpected_shape_does_not_stop_the_reader(history, record):
    assert history(META, record, step(102, 7)).step == 7


def test_rows_merge_what_the_probe_saw_with_what_the_script_reported(folder, write_metrics):
    write_metrics(
        0,
        META,
        step(101, 4, n=4, seconds=(2.0, 0.25, 1.0), samples=64, loss=9.0, rss=7),
        report(102, step=4, loss=3.0, accuracy=0.5),
    )

    assert list(rows(folder)) == [
        {
            "rank": 0,
            "attempt": 1,
            "step": 4,
            "time": 2.0,
            "loss": 3.0,
            "accuracy": 0.5,
            "samples": 64.0,
            "rss": 7.0,
            "steps": 4,
            "step_seconds": 0.5,
            "step_seconds_min": 0.25,
            "step_seconds_max": 1.0,
            "throughput": 32.0,
        }
    ]


def test_the_scripts_own_loss_wins_in_rows_whichever_came_first(folder, write_metrics):
    write_metrics(0, META, report(101, step=1, loss=3.0), step(102, loss=9.0))

    assert [row["loss"] for row in rows(folder)] == [3.0]


def test_what_a_script_reports_never_replaces_a_rows_own_keys(folder, write_metrics):
    write_metrics(0, META, report(101, step=1, time=9.0))

    assert [row["time"] for row in rows(folder)] == [1.0]


def test_rows_are_in_order_of_rank_and_step(folder, write_metrics):
    for rank in (10, 2):
        write_metrics(rank, META, step(102, 7), step(101, 3))

    assert [(row["rank"], row["step"]) for row in rows(folder)] == [(2, 3), (2, 7), (10, 3), (10, 7)]


def test_rows_read_nan_as_a_number_and_leave_words_as_they_are(folder, write_metrics):
    write_metrics(0, META, report(101, step=1, loss="nan", phase="warm-up"))

    (row,) = rows(folder)

    assert math.isnan(row["loss"])
    assert row["phase"] == "warm-up"


@pytest.mark.parametrize("record", [report(101, step="x"), {"k": "later", "t": 1, "step": 1}, report(101, step=[1])])
def test_records_without_a_step_or_a_value_are_no_rows(folder, write_metrics, record):
    write_metrics(0, META, record)

    assert list(rows(folder)) == []


def test_values_without_a_step_are_in_the_row_of_the_last_step_or_of_the_first(folder, write_metrics):
    write_metrics(
        0,
        META,
        report(101, parameters=7, input=99.0),
        step(102, 2, input=3.0),
        report(103, f1=0.5, time=9.0, n=4, seconds=2.0),
        report(104, step=3, input=2.0),
        report(105, f1=0.6),
        report(106, f1=0.7, rank=5),
    )
    first, second = (
        {k: row.get(k) for k in ("rank", "step", "time", "input", "f1", "parameters", "n", "seconds")}
        for row in rows(folder)
    )

    assert first == {
        "rank": 0,
        "step": 2,
        "time": 2.0,
        "input": 3.0,
        "f1": 0.5,
        "parameters": 7,
        "n": 4,
        "seconds": 2.0,
    }
    assert second == first | {"step": 3, "time": 4.0, "input": 2.0, "f1": 0.7} | dict.fromkeys(
        ("parameters", "n", "seconds")
    )


def test_a_loss_that_the_script_reports_has_no_others_beside_it(folder, write_metrics):
    write_metrics(0, META, step(101, 1, loss=3.0, loss_of="sum of 2 losses"), report(102, step=2, loss=2.0))

    assert [(row.get("loss"), row.get("loss_of")) for row in rows(folder)] == [(None, None), (2.0, None)]


def test_a_script_without_steps_has_one_row_of_what_it_reported(folder, write_metrics):
    write_metrics(0, META, report(101, f1=0.5), report(102, accuracy=0.9))

    assert list(rows(folder)) == [{"rank": 0, "attempt": 1, "step": 0, "time": 0.0, "f1": 0.5, "accuracy": 0.9}]


def test_values_of_a_resumed_run_without_a_step_are_in_its_first_row(folder, write_metrics):
    write_metrics(0, META, report(101, start_step=8, total_steps=20), step(102, 1))

    assert [(row["step"], row["total_steps"]) for row in rows(folder)] == [(9, 20.0)]


@pytest.mark.parametrize("start", ["x", [1], None, "inf", {}])
def test_a_start_that_is_no_number_is_none(folder, write_metrics, start):
    write_metrics(0, META, report(101, start_step=start, f1=0.5))
    assert [row["step"] for row in rows(folder)] == [0]
    write_metrics(0, step(102, 1))
    assert [row["step"] for row in rows(folder)] == [1]
    assert RunReader(folder).read_all().ranks[0].step == 1


def test_a_step_in_words_leaves_the_other_values_of_its_record(history):
    read = history(META, report(101, step="warm-up", f1=0.5))

    assert (read.step, read.values["f1"]) == (0, 0.5)


def test_the_names_of_values_are_kept_in_bounded_memory(history):
    read = history(
        META,
        *(report(101, **{f"loss of step {i}": i}) for i in range(KEPT_NAMES + 5)),
        report(102, **{"loss of step 3": 0.5}),
    )

    assert len(read.values) == KEPT_NAMES
    assert read.values["loss of step 3"] == 0.5


def test_throughput_is_none_where_no_samples_were_seen(folder, write_metrics):
    write_metrics(0, META, step(101, samples=0))

    assert [row["throughput"] for row in rows(folder)] == [None]


def test_the_mean_throughput_is_that_of_the_steps_whose_samples_are_known(folder, write_metrics):
    known, unknown = (step(102, 2, seconds=(2.0, 2.0, 2.0), samples=samples) for samples in (64, None))
    write_metrics(0, META, known, unknown | {"step": 3})
    reader = RunReader(folder).read_all()
    assert words.mean_throughput(reader) == 32
    assert reader.throughputs() == [32]

    write_metrics(0, META, known, unknown | {"step": 3}, unknown | {"step": 4})
    assert words.mean_throughput(RunReader(folder).read_all()) is None


def test_the_second_part_of_a_record_completes_the_first(folder, write_metrics):
    first = step(101, 3, n=3, seconds=(6.0, 2.0, 2.0), samples=24)
    second = {"k": "step", "t": 101, "step": 3, "of": 3, "forward": 1.5, "communication": None, "loss": 0.5}
    write_metrics(0, META, first, second)

    (row,) = rows(folder)
    assert (row["steps"], row["samples"], row["throughput"], row["step_seconds"]) == (3, 24, 4, 2)
    assert (row["forward"], row["loss"]) == (0.5, 0.5)
    history = RunReader(folder).read_all().ranks[0]
    assert (history.step, history.totals["steps"], history.totals["samples"]) == (3, 3, 24)
    assert (history.totals["forward"], history.recent_seconds("forward")) == (1.5, 0.5)
    assert history.latest["loss"] == 0.5


def test_ranks_are_in_order_whichever_started_first(folder, write_metrics):
    write_metrics(1, META)
    reader = RunReader(folder)
    reader.poll()
    write_metrics(0, META)
    reader.poll()

    assert list(reader.ranks) == [0, 1]
