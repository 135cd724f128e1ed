import base64
import html.parser
import json
import math
import random
import re
import sys
import time
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import words
from labkit.charts import Chart, Palette, Points, dot, drawn, png
from labkit.frontend import close_widget
from labkit.record import Cause, RunFolder, RunReader, State
from labkit.series import Series
from labkit.view.comparison import compare
from labkit.view.live.dashboard import Dashboard
from labkit.view.live.page import plain, run_html, run_text, tail_of_log
from labkit.view.live.run_charts import Look, charts_svg, curves, run_charts
from labkit.view.live.tables import rank_rows, rank_table
from labkit.view.live.verdict import verdict
from labkit.view.report import static_bundle, write_report

IMAGE = "<img src=x onerror=alert(1)>"
SCRIPT = "</script><script>alert(1)</script>"
ALLOWED = {
    "div",
    "b",
    "code",
    "span",
    "style",
    "svg",
    "g",
    "text",
    "tspan",
    "path",
    "table",
    "tr",
    "th",
    "td",
    "pre",
    "details",
    "summary",
}
RUNNING = State("running", 0.0)


class Tags(html.parser.HTMLParser):
    """What a browser would see: the elements, their attributes and the text."""

    def __init__(self, source):
        super().__init__()
        self.elements, self.attributes, self.text = set(), set(), ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data):
        self.text += data


def assert_harmless(source):
    seen = Tags(source)
    assert seen.elements <= ALLOWED
    assert not [name for name in seen.attributes if name.startswith("on") or name in ("src", "href")]


def series_of(values, width=1.0):
    series = Series(width)
    for x, value in values:
        series.add(x, value)
    return series


def four_charts(values, ranks=8):
    names = ("loss", "throughput", "step time", "memory")
    return [Chart(name, {rank: series_of(values) for rank in range(ranks)}, words.quantity) for name in names]


def noise(bins):
    draw = random.Random(0)
    return [(i / 4, 100 * draw.random()) for i in range(4 * bins)]


@pytest.fixture
def reader(folder, write_metrics):
    """Two ranks that have trained for three steps."""
    for rank in (0, 1):
        write_metrics(rank, {"k": "meta", "t": 10.0, "rank": rank, "device": "cpu"})
        for i in (1, 2, 3):
            times = {"n": 10, "seconds": [1.0, 0.05, 0.5], "input": 0.25}
            write_metrics(
                rank,
                {"k": "step", "t": 10.0 + i, "step": 10 * i, "samples": 640, "loss": 3.0 / i, "rss": 2**28, **times},
            )
        write_metrics(rank, {"k": "report", "t": 13.5, "total_steps": 60})
    return RunReader(folder).read_all()


@pytest.fixture
def whole_folder(folder, reader):
    """A folder with everything that a launch writes into it."""
    folder.manifest.write_text(json.dumps({"format": 1, "name": "demo", "world_size": 2}))
    folder.script.write_text("print('demo')\n")
    folder.command.write_text("torchrun demo.py\n")
    State("succeeded", 1.0, 5.0).write(folder)
    return folder


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (0, "0"),
        (0.0123456, "0.0123"),
        (12.345, "12.3"),
        (999.4, "999"),
        (1000, "1,000"),
        (12345.6, "12,346"),
        (-5, "-5"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_quantities_have_three_digits(value, text):
    assert words.quantity(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (0, "0"),
        (1, "1 B"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (300 * 2**20, "300.0 MiB"),
        (2**30, "1.00 GiB"),
        (1.5 * 2**30, "1.50 GiB"),
        (80 * 2**30, "80.00 GiB"),
    ],
)
def test_bytes_are_shown_in_a_fitting_unit(value, text):
    assert words.gib(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (0, "0"),
        (0.0000012, "0.0012 ms"),
        (0.0012, "1.2 ms"),
        (0.25, "250 ms"),
        (1, "1 s"),
        (3.456, "3.46 s"),
        (60, "1 min 0 s"),
        (306, "5 min 6 s"),
        (3599.6, "1 h 0 min"),
        (3720, "1 h 2 min"),
    ],
)
def test_times_are_shown_in_a_fitting_unit(value, text):
    assert words.seconds(value) == text


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [(words.quantity, 999.6, "1,000"), (words.seconds, 0.9996, "1 s")],
    ids=["number", "time"],
)
def test_a_figure_just_below_a_thousand_has_no_exponent(show, value, text):
    assert show(value) == text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_time_that_is_not_finite_is_shown_as_nan_or_inf(value):
    assert words.seconds(value) == str(value)


@pytest.mark.parametrize("value", [1e15, 3.4e38])
def test_a_huge_quantity_still_fits_its_axis(value):
    assert len(words.quantity(value)) <= 10


def test_progress_tells_where_a_run_is(folder, reader, write_metrics):
    assert words.progress(reader, RUNNING) == "step 30 of 60 (50%), about 3 s left"
    assert words.progress(reader, State("stopped", 0.0)) == "step 30 of 60 (50%)"


def test_progress_follows_the_slowest_rank(folder, reader, write_metrics):
    write_metrics(1, {"k": "step", "t": 15, "step": 59, "n": 1, "seconds": [1, 1, 1]})
    reader.poll()

    assert words.progress(reader, RUNNING).startswith("step 30 of 60")


def test_a_rank_that_cannot_be_read_hides_no_step_of_the_others(folder, reader, write_metrics):
    write_metrics(2, b"\xff\xfe no records\n")
    reader.poll()

    assert words.progress(reader, State("succeeded", 0.0)) == "step 30 of 60 (50%)"


def test_a_rank_that_was_killed_before_it_wrote_a_step_hides_none_of_the_others(folder, reader, write_metrics):
    write_metrics(2, {"k": "meta", "t": 10.0, "rank": 2})
    reader.poll()

    assert words.progress(reader, State("failed", 0.0)) == "step 30, of which rank 2 recorded none"


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ([], "starting the ranks"),
        ([{"k": "meta", "t": 1}], "preparing: no step yet"),
        ([{"k": "step", "t": 1, "step": 1234, "n": 1, "seconds": [1, 1, 1]}], "step 1,234"),
        (
            [{"k": "step", "t": 1, "step": 5, "seconds": [1, 1, 1]}, {"k": "report", "t": 1, "total_steps": "many"}],
            "step 5",
        ),
        (
            [{"k": "step", "t": 1, "step": 5, "seconds": [1, 1, 1]}, {"k": "report", "t": 1, "total_steps": 5}],
            "step 5 of 5 (100%), evaluating",
        ),
    ],
    ids=["no rank", "no step", "no total", "total in words", "all steps"],
)
def test_progress_before_and_without_a_total(folder, write_metrics, records, text):
    if records:
        write_metrics(0, *records)

    assert words.progress(RunReader(folder).read_all(), RUNNING) == text


def test_the_headline_tells_loss_speed_and_memory(reader):
    assert words.headline(reader, State("succeeded", 0.0)) == (
        "step 30 of 60 (50%) · loss 1 · 1,280 samples/s on average · peak resident set 256.0 MiB"
    )


@pytest.mark.parametrize(
    ("took", "text"),
    [(0.134, "last steps: rank 1 slowest, by 34 ms"), (0.104, "last steps: equal on all ranks")],
)
def test_a_rank_is_named_slowest_only_for_more_than_noise(folder, write_metrics, took, text):
    for rank, usual in enumerate((0.1, took)):
        write_metrics(rank, {"k": "meta", "t": 0.0})
        for i in range(1, 21):
            write_metrics(rank, {"k": "step", "t": i, "step": i, "n": 1, "seconds": [usual, usual, usual]})

    assert words.skew(RunReader(folder).read_all()) == text


def test_a_stuck_run_does_not_look_like_a_running_one(folder, reader):
    now = time.time()
    folder.manifest.write_text(json.dumps({"created": datetime.fromtimestamp(now - 60, UTC).isoformat()}))
    notice = (
        "no rank has made progress since 12:00:00: rank 1 has not entered `all_reduce` #5. Rank 1 is at step 30 in "
        "a.py line 8: `work(); time.sleep(600)`; rank 0 is at step 30, waiting in `all_reduce` (a.py line 9)"
    )
    state = State("running", now - 60, notice=notice, stuck_since=now - 12)

    page, text = run_html(folder, reader, state), run_text(folder, reader, state)

    assert re.search(r"stuck 1[23] s</b>", page)
    assert "<div>Rank 1 is at step 30 in a.py line 8: <code>work(); time.sleep(600)</code></div>" in page
    assert "<div>Rank 0 is at step 30, waiting in <code>all_reduce</code> (a.py line 9)</div>" in page
    assert page.index("no rank has made progress") < page.index("step 30 of 60") < page.index("input-bound")
    assert "no progress</text>" in page
    assert all(promise not in page + text for promise in ("about 3 s left", "1,280 samples/s"))
    assert words.status(State("failed", 0.0, 5.0, 1, Cause(out_of_memory="device"))) == ("failed: out of device memory")


def test_the_cause_of_a_failure_comes_first_with_its_traceback_open(folder, reader):
    folder.error(0).write_text(json.dumps({"exception": "E", "message": "closed", "traceback": ["of rank 0"]}))
    cause = Cause("exception", "rank 1 failed", advice=("do:\n- this",), ranks=(1,), traceback=("of rank 1",))

    page = run_html(folder, reader, State("failed", 0.0, 5.0, 1, cause))

    assert page.index("rank 1 failed") < page.index("of rank 1") < page.index("of rank 0") < page.index("step 30 of 60")
    assert re.findall(r"<details( open)?>", page) == [" open", ""]
    assert '"white-space:pre-line">Do:\n- this<' in page


def test_the_shares_in_the_table_are_of_the_steps_that_the_verdict_is_about(folder, write_metrics):
    write_metrics(0, {"k": "meta", "t": 0.0})
    for i in range(1, 201):
        times = {"seconds": [0.1] * 3, "input": 0.09 if i < 100 else 0.02}
        write_metrics(0, {"k": "step", "t": i / 10, "step": i, "n": 1, **times})
    reader = RunReader(folder).read_all()

    assert verdict(reader, RUNNING)[0].startswith("input-bound: 20%")
    assert rank_rows(reader)[0]["input wait"] == "20.0%"
    assert "means of the last 50 steps" in rank_table(reader)


def test_what_a_script_measured_itself_is_in_the_view_the_text_and_the_report(whole_folder, write_metrics):
    for rank in (0, 1):
        write_metrics(
            rank,
            {"k": "report", "t": 14, "parameters": 9, "train_samples": 640, "phase": "warm-up", "best": True},
            {"k": "report", "t": 15, "step": 30, "loss": 0.5, "gradient_norm": 0.25},
            {"k": "report", "t": 16, "f1": 0.5 + rank / 4},
            {"k": "report", "t": 17, "step": 30, "test_loss": 1.5, "test_accuracy": 0.73125, "test_samples": 64},
        )
    reader, state = RunReader(whole_folder).read_all(), State("succeeded", 1.0, 5.0)
    values = {"test_loss": "1.5", "test_accuracy": "0.7312", "gradient_norm": "0.25", "f1": "0.625 (0.5 to 0.75)"}

    assert words.reported(reader) == list(values.items())
    assert run_text(whole_folder, reader, state).splitlines()[2] == "  ".join(map(" ".join, values.items()))
    for page in (run_html(whole_folder, reader, state), write_report(whole_folder).read_text()):
        assert "test_loss 1.5test_accuracy 0.7312gradient_norm 0.25f1 0.625 (0.5 to 0.75)" in Tags(page).text


def test_a_script_that_reports_none_has_no_row_of_values(folder, reader):
    assert words.reported(reader) == []
    assert run_text(folder, reader, RUNNING).splitlines()[2].startswith("input-bound")


def test_extremes_are_those_of_ranks_at_the_same_step(folder, write_metrics):
    for rank in (0, 1):
        write_metrics(rank, {"k": "report", "t": 1, "step": 7 + rank, "f1": 0.5 + rank / 4})

    assert words.reported(RunReader(folder).read_all()) == [("f1", "0.625")]


def test_very_many_values_with_long_names_are_a_bounded_row(folder, write_metrics):
    write_metrics(0, {"k": "report", "t": 1, **{f"gradient norm of\nlayer {i} {'x' * 900}": i for i in range(300)}})
    reader = RunReader(folder).read_all()
    values = words.reported(reader)

    assert values[-1] == ("others", "288")
    assert len(values) == 13
    assert values[0][0].startswith("gradient norm of layer 0 x")
    assert len(run_html(folder, reader, RUNNING)) < 20_000


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", 10**400])
def test_a_reported_value_that_is_not_finite_is_shown_as_such(folder, write_metrics, value):
    write_metrics(0, {"k": "report", "t": 1, "f1": value})

    assert words.reported(RunReader(folder).read_all()) == [("f1", str(float(str(value))))]


def test_what_was_measured_on_the_test_set_is_compared(whole_folder, write_metrics):
    write_metrics(0, {"k": "report", "t": 14, "test_loss": 1.5, "test_top5": 0.9, "test_samples": 64, "test_note": "x"})
    comparison = compare([SimpleNamespace(folder=whole_folder)])

    (row,) = comparison.table[["test_loss", "test_top5", "test_accuracy"]].astype(object).values.tolist()
    assert row == [1.5, 0.9, None]
    assert {"test accuracy": "n/a", "test loss": "1.5", "test top5": "0.9"}.items() <= comparison._rows()[0].items()
    assert not {"test samples", "test note"} & comparison._rows()[0].keys()
    assert "test top5" in Tags(comparison._repr_mimebundle_()["text/html"]).text


@pytest.mark.parametrize("after", [0.0004, 0.018])
def test_each_loss_is_drawn_at_its_own_step(folder, write_metrics, after):
    """Steps and reports are kept in bins of time that begin at different moments."""
    moments = [10 + 0.55 * step + 0.09 * math.sin(step) for step in range(1, 23)]
    for step, moment in enumerate(moments, 1):
        seconds = {"n": 1, "seconds": [0.5, 0.5, 0.5], "samples": 128}
        write_metrics(0, {"k": "step", "t": moment, "step": step, **seconds})
        late = after if step > 1 else 0.018
        write_metrics(0, {"k": "report", "t": moment + late, "step": step, "loss": 3.0 / step})

    points = curves(RunReader(folder).read_all())["loss"].points()

    assert [(x, round(value, 9)) for x, *_, value in points] == [(s, round(3.0 / s, 9)) for s in range(1, 23)]


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([{"start_step": 40, "steps_per_epoch": 100}, {"step": 60, "training_seconds": 5.0}], 25.0),
        ([{"steps_per_epoch": 100}, {"step": 50, "training_seconds": 5.0}], 10.0),
        ([{"start_step": 40, "steps_per_epoch": 100}, {"step": 40, "training_seconds": 0.1}], None),
        ([{"start_step": 40, "steps_per_epoch": 100}, {"step": 60}], None),
        ([{"steps_per_epoch": 100, "epoch_seconds": 9.0}, {"epoch_seconds": 11.0}, {"training_seconds": 20.0}], 10.0),
    ],
)
def test_an_epoch_takes_what_its_steps_take_unless_the_script_said(whole_folder, write_metrics, reports, expected):
    for report in reports:
        write_metrics(0, {"k": "report", "t": 14, **report})
    comparison = compare([SimpleNamespace(folder=whole_folder)])

    assert comparison.summaries[0]["epoch_seconds"] == expected
    assert comparison._rows()[0]["per epoch"] == words.seconds(expected)


def test_charts_are_valid_xml_with_a_line_per_rank():
    root = ET.fromstring(drawn(four_charts([(float(i), math.sin(i)) for i in range(256)])))
    lines = [path for path in root.iter("{http://www.w3.org/2000/svg}path") if path.get("stroke-dasharray") is not None]

    assert len(lines) == 4 * 8
    assert all(re.fullmatch(r"M-?\d+ -?\d+(l[-\d ]+|h\d)", line.get("d")) for line in lines)


@pytest.mark.parametrize("bins", [1, 2, 100, 256])
def test_four_charts_of_eight_ranks_fit_into_one_message(bins):
    values = [(float(i), 3 * math.exp(-i / 80) + math.sin(i) / 50) for i in range(bins)]

    assert len(drawn(four_charts(values)).encode()) < 40_000


@pytest.mark.parametrize("bins", [70, 140, 210, 256])
def test_four_charts_of_eight_noisy_ranks_fit_into_one_message(bins):
    assert len(drawn(four_charts(noise(bins))).encode()) < 40_000


@pytest.mark.parametrize("at", [0, 1, 100, 128, 254, 255])
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_spike_survives_thinning(at, ranks):
    flat = [(i + j / 4, 1.0) for i in range(256) for j in range(4)]
    spiked = [(x, 100.0 if i == 4 * at + 1 else y) for i, (x, y) in enumerate(flat)]

    page = drawn([Chart("loss", {rank: series_of(spiked) for rank in range(ranks)}, words.quantity)])
    heights = [int(y) for y in re.findall(r"V(-?\d+)", page)]

    assert len(heights) == ranks
    assert max(heights) < 40


def test_charts_look_alike_whatever_the_amount_of_data():
    few, many = drawn(four_charts([(0.0, 1.0)])), drawn(four_charts(noise(256)))

    assert re.search(r'viewBox="[^"]*"', few)[0] == re.search(r'viewBox="[^"]*"', many)[0]


def test_a_chart_without_data_says_so():
    page = drawn([Chart("loss", {0: Series(), 1: series_of([(0.0, math.nan)])}, words.quantity)])

    assert any(text.startswith("no data") for text in ET.fromstring(page).itertext())


def test_a_chart_tells_its_last_values_to_a_screen_reader():
    page = drawn([Chart("loss", {0: series_of([(0.0, 3.0)]), 1: series_of([(0.0, 2.0)])}, words.quantity)])

    assert ET.fromstring(page)[0].get("aria-label") == "loss: rank 0 3, rank 1 2"


@pytest.mark.parametrize("name", ["\x1b[31mred\x00", "a\x1b]0;title\x07b", "\ud800"])
def test_what_is_read_out_has_no_control_characters(name):
    line = {0: series_of([(0.0, 1.0)])}

    ET.fromstring(drawn([Chart(name, line, words.quantity, label=lambda _: name)]))


def test_a_charts_words_are_escaped():
    page = drawn([Chart(f'{IMAGE}"', {0: series_of([(0.0, 1.0)])}, lambda value: IMAGE)])

    assert "<img" not in page
    ET.fromstring(page)


@given(st.lists(st.floats(-1e30, 1e30, allow_subnormal=False), min_size=1, max_size=20))
def test_any_values_of_a_training_can_be_drawn(values):
    page = drawn([Chart("loss", {0: series_of(enumerate(values))}, words.quantity)])

    assert "nan" not in page
    ET.fromstring(page)


@pytest.mark.parametrize("log", [None, True])
def test_values_near_the_smallest_float_can_be_drawn_on_any_scale(log):
    line = {0: series_of([(0.0, 5e-324), (1.0, 1e-20)])}

    ET.fromstring(drawn([Chart("loss", line, words.quantity, from_zero=False, log=log)]))


@pytest.mark.parametrize("value", [5e-324, 1e308, -1.7e308])
def test_the_largest_and_smallest_floats_can_be_drawn(value):
    ET.fromstring(drawn([Chart("loss", {0: series_of([(0.0, value), (1.0, -value)])}, words.quantity)]))


def test_eight_ranks_are_told_apart_by_colour_and_by_dash():
    assert len(set(Palette.LINES)) == len(set(Palette.DASHES)) == 8
    assert len({dot(rank) for rank in range(8)}) == 8
    assert dot(8) == dot(0)


def test_a_log_that_is_not_utf8_is_shown_all_the_same(folder, reader):
    folder.log(0).write_bytes(b"caf\xe9 \xff\xfe\nafter\n")

    assert tail_of_log(folder, 0, 10) == ["caf\ufffd \ufffd\ufffd", "after"]


def test_only_the_end_of_a_huge_log_is_read(folder, reader):
    folder.log(0).write_bytes(b"x" * 5_000_000 + b"\nlast\n")

    lines = tail_of_log(folder, 0, 10)

    assert lines[-1] == "last"
    assert sum(map(len, lines)) < 20_000
    assert len(run_html(folder, reader, RUNNING)) < 20_000


def test_a_rank_without_a_log_has_no_lines(folder):
    assert tail_of_log(folder, 7, 10) == []


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain é", "plain é"),
        ("a\r\nb", "a\nb"),
        ("10%\r50%\r90%", "90%"),
        ("10%\r50%\nnext", "50%\nnext"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b[2K\x1b[1A\x1b[?25lx", "x"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bM\x1b7x", "x"),
        ("a\tb", "a\tb"),
        ("a\x00b\x07", "a\ufffdb\ufffd"),
        ("", ""),
    ],
)
def test_a_log_reads_as_it_was_last_seen_on_a_terminal(text, seen):
    assert plain(text) == seen


@pytest.mark.parametrize("text", ["50%\r", "10%\r50%\r"])
def test_a_line_that_waits_to_be_overwritten_is_still_seen(text):
    assert plain(text) == "50%"


@given(st.text())
def test_plain_text_holds_no_control_characters(text):
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", plain(text))


def test_a_run_in_plain_text_tells_the_same(folder, reader):
    state = State("failed", 0.0, 5.0, 1, Cause(sentence="rank 1 failed: \x1b[31mValueError\x1b[0m"))

    lines = run_text(folder, reader, state).splitlines()

    assert lines[0] == f"{folder.id}: failed after 5 s"
    assert lines[1] == words.headline(reader, state)
    assert lines[2] == "rank 1 failed: ValueError"
    assert lines[3].startswith("input-bound: 25% of each step is spent waiting for data on rank ")
    assert [line.split()[:6] for line in lines[4:]] == [["rank", str(r), "device", "cpu", "step", "30"] for r in (0, 1)]


def test_a_run_that_failed_is_marked_as_such_even_if_it_was_wrong_before(folder, reader):
    cause = Cause("slip", "rank 0 left out `all_reduce`; `a; b`", advice=("Call `it`.",))
    page = run_html(folder, reader, State("failed", 0.0, 5.0, 1, cause, notice="note: same samples", wrong=True))
    assert "✖&nbsp;failed" in page and "▲" not in page
    assert "<b>rank 0 left out <code>all_reduce</code>; <code>a; b</code></b>" in page
    assert page.index("Call <code>it</code>.") < page.index("note: same samples")
    assert "▲&nbsp;succeeded, but wrong" in run_html(folder, reader, State("succeeded", 0.0, 5.0, 0, wrong=True))


@pytest.mark.parametrize("name", ["starting", "running", "succeeded", "failed", "stopped", "lost"])
def test_every_state_has_a_page_and_a_text(folder, reader, name):
    state = State(name, 0.0, 5.0)

    assert f"&nbsp;{name}</b>" in run_html(folder, reader, state)
    assert f": {name} after 5 s" in run_text(folder, reader, state)


def test_a_run_that_has_not_started_has_a_page_and_a_text(folder):
    reader = RunReader(folder)

    assert_harmless(run_html(folder, reader, RUNNING))
    assert "starting the ranks" in run_text(folder, reader, RUNNING)


def test_the_four_charts_hold_every_rank(reader):
    assert [sorted(chart.series) for chart in run_charts(reader, Look())] == [[0, 1]] * 4


def test_the_static_bundle_is_html_and_text_and_holds_no_script(folder, reader):
    folder.log(0).write_text(f"{SCRIPT}\n")
    state = State("failed", 0.0, 5.0, 1, Cause(sentence=SCRIPT, traceback=(SCRIPT,)))

    bundle = static_bundle(folder, reader, state)

    assert {"text/html", "text/plain"} <= set(bundle) <= {"text/html", "text/plain", "image/png"}
    assert "<script" not in bundle["text/html"].lower()
    page, pictures = bundle["text/html"], []
    for tag, source in re.findall(r'(<img src="data:image/svg\+xml;base64,([^"]+)"[^>]*>)', page):
        pictures.append(ET.fromstring(base64.b64decode(source)))
        page = page.replace(tag, "")
    assert_harmless(page)
    assert len(pictures) == 4 + 2  # the charts, and each rank's line in the table
    assert all(picture.get("color").startswith("#") for picture in pictures)  # the page's does not reach in there
    assert "<title>" in run_html(folder, reader, state)
    assert not any("title" in element.tag for picture in pictures for element in picture.iter())
    assert bundle["text/plain"] == run_text(folder, reader, state)
    json.dumps(bundle)


def test_the_static_bundle_does_without_matplotlib(folder, reader, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    assert set(static_bundle(folder, reader, RUNNING)) == {"text/html", "text/plain"}


def test_the_static_bundle_of_a_smooth_run_on_eight_ranks_fits_a_notebook(folder, write_metrics):
    for rank in range(8):
        records = (
            {
                "k": "step",
                "t": float(i),
                "step": i,
                "n": 1,
                "seconds": [0.1] * 3,
                "loss": 3 * math.exp(-i / 80),
                "rss": 9,
            }
            for i in range(256)
        )
        write_metrics(rank, {"k": "meta", "t": 0.0}, *records)

    bundle = static_bundle(folder, RunReader(folder).read_all(), State("succeeded", 0.0, 256.0))

    assert sum(len(part.encode()) for part in bundle.values()) <= 60_000


def test_the_report_holds_the_command_the_script_the_record_and_every_log(whole_folder):
    whole_folder.log(0).write_text("said by rank 0\n")
    whole_folder.log(1, "stderr").write_text("said by rank 1\n")

    text = Tags(write_report(whole_folder).read_text(encoding="utf-8")).text

    for part in ("torchrun demo.py", "print('demo')", '"world_size": 2', "said by rank 0", "said by rank 1"):
        assert part in text


def test_a_report_is_written_again_over_the_older_one(whole_folder):
    write_report(whole_folder)
    whole_folder.log(0).write_text("said since\n")

    assert "said since" in write_report(whole_folder).read_text(encoding="utf-8")


def reporting(root, ranks, steps, **curves):
    """A run in which every rank reports these functions of the step beside its loss, each every so many steps."""
    folder = RunFolder(root / "20260102T030405Z-reporting-0a1b")
    folder.ranks.mkdir(parents=True)
    folder.manifest.write_text(json.dumps({"format": 1, "name": "reporting", "world_size": ranks}))
    for rank in range(ranks):
        folder.rank(rank).mkdir()
        lines = [{"k": "meta", "t": 0.0, "time": 1.0, "device": "cpu"}]
        for step in range(1, steps + 1):
            times = {"n": 1, "seconds": [0.1, 0.1, 0.1], "samples": 8, "forward": 0.05, "rss": 2**28}
            lines.append({"k": "step", "t": step / 10, "step": step, "loss": 3 / step + rank / 100} | times)
            values = {name: curve(step) for name, (every, curve) in curves.items() if step % every == 0}
            values |= {name: value + rank for name, value in values.items() if name.startswith("own")}
            lines.append({"k": "report", "t": step / 10, "step": step} | values)
        folder.metrics(rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_metric_is_one_chart_with_its_validation_and_the_best_marked(tmp_path):
    curves = {
        "train_accuracy": (1, lambda step: step / 100),
        "val_accuracy": (10, lambda step: 0.5 - abs(step - 40) / 100),
        "test_loss": (10, lambda step: 2 + abs(step - 30) / 10),
        "best_loss": (10, lambda step: 2.0),
        "lr": (1, lambda step: 1e-3 / step),
        "parameters": (50, lambda step: 1000.0),
    }
    reader = RunReader(reporting(tmp_path, 2, 60, **curves)).read_all()

    charts = {chart.title: chart for chart in run_charts(reader, Look())}

    assert list(charts) == ["loss", "throughput per rank", "step time", "memory per rank", "accuracy", "lr"]
    assert charts["accuracy"].best_point()[1] == 0.5
    assert charts["loss"].best_point()[1] == 2.0
    assert "best 2<" in drawn([charts["loss"]])
    assert charts["lr"].evaluated is None


def test_saved_checkpoints_are_marked_and_failed_ones_are_not(tmp_path):
    saved = {"checkpoint": (20, lambda step: f"step-{step}" if step < 60 else f"step {step} not saved: full disk")}
    reader = RunReader(reporting(tmp_path, 1, 60, **saved)).read_all()

    (loss, *_) = run_charts(reader, Look())
    (by_step, *_) = run_charts(reader, Look(axis="step"))

    assert loss.saved == (2.0, 4.0)
    assert by_step.saved == pytest.approx((20, 40), abs=1)
    assert drawn([loss]).count("l3 5h-6z") == 2


def test_another_axis_moves_points_along_the_steps(tmp_path):
    reader = RunReader(reporting(tmp_path, 2, 60, lr=(1, float))).read_all()

    by_step = {chart.title: chart for chart in run_charts(reader, Look(axis="step"))}["lr"].series[0].points()
    by_sample = {chart.title: chart for chart in run_charts(reader, Look(axis="samples"))}["lr"].series[0].points()

    assert all(abs(x - last) < 1 for x, _, _, last in by_step[:-1])  # the value is the step
    assert by_sample[-1][0] == pytest.approx(60 * 16, rel=0.05)
    assert "step 60" in charts_svg(reader, Look(axis="step"))


def test_smoothing_changes_the_line_and_keeps_the_extremes(tmp_path):
    noisy = {"accuracy": (1, lambda step: float(step % 2))}
    reader = RunReader(reporting(tmp_path, 1, 60, **noisy)).read_all()

    *_, drawn = run_charts(reader, Look(smoothing=0.9))

    points = drawn.series[0].points()
    assert 0.2 < points[-1][3] < 0.8
    assert {low for _, low, _, _ in points} | {high for _, _, high, _ in points} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([3.0, 0.03, 0.003], ["0.001", "10"]),
        ([3.0, 2.9, 2.8], ["2.8", "3"]),
        ([3.0, 1.0, 0.5], ["0", "3"]),
        ([-3.0, -2.9, -2.8], ["-3", "-2.8"]),
        ([-0.003, -0.001], ["-0.003", "0"]),
    ],
)
def test_the_axis_of_a_loss_fits_what_it_shows(values, labels):
    line = series_of(enumerate(values))

    page = drawn([Chart("loss", {0: line}, words.quantity, from_zero=False, log=None)])

    shown = re.findall(r'<text x="48" y="\d+">([^<]*)<', page)
    assert shown[0] == labels[0] and labels[1] in shown


def test_the_last_column_under_the_pointer_has_the_last_value_however_the_axis_is_rounded():
    start, end = next(
        (a / 10, b / 10) for a in range(1, 99) for b in range(101, 999) if a / 10 + (b / 10 - a / 10) < b / 10
    )

    *_, last = re.findall(
        r"<title>([^<]*)", drawn([Chart("loss", {0: Points.of([(start, 1.0), (end, 2.0)])}, words.quantity)])
    )

    assert last.endswith("rank 0 2")


def test_an_ideal_line_above_all_others_is_within_the_chart():
    lines = {0: Points.of([(1.0, 1.0), (8.0, 4.0)])}
    chart = Chart("scaling", lines, words.quantity, over="ranks", ideal=Points.of([(1.0, 1.0), (8.0, 8.0)]))

    page = drawn([chart])

    assert ">8<" in "".join(re.findall(r'<text x="48" y="\d+">[^<]*<', page))
    x, y, dx, dy = map(int, re.search(r'd="M(\d+) (\d+)l(\d+) ?(-\d+)" fill="none" stroke="currentC', page).groups())
    assert 20 <= y + dy < y


def test_the_best_value_does_not_cover_what_was_changed():
    course = [(float(x), 0.3 + 3 * math.exp(-x / 20) + abs(x - 80) / 150) for x in range(200)]
    lines = {rank: Points.of((x, y + rank / 5) for x, y in course) for rank in range(4)}
    changes = ((60.0, "lr=0.01"),)
    chart = Chart("loss", lines, words.quantity, evaluated=lines[0], best="lowest", changes=changes)

    page = drawn([chart])

    places = {text: (int(x), int(y)) for x, y, text in re.findall(r'<text x="(\d+)" y="(\d+)"[^>]*>(\w+)', page)}
    changed, best = places["lr"], places["best"]
    assert abs(changed[1] - best[1]) > 8 or abs(changed[0] - best[0]) > 50


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("title", ["$\\frac{$", "\x1b[31mred\x00", "loss"])
def test_any_title_is_drawn_as_png_without_a_warning(title):
    line = {0: series_of([(0.0, 1.0), (1.0, 2.0)])}

    assert png([Chart("loss", {}, words.quantity), Chart(title, line, words.quantity)])


def test_a_column_under_the_pointer_names_every_rank():
    lines = {rank: series_of([(0.0, rank + 1.0), (10.0, rank + 2.0)]) for rank in range(2)}

    titles = re.findall(r"<title>([^<]*)</title>", drawn([Chart("loss", lines, words.quantity)]))

    assert titles[0].splitlines() == ["0.5 s", "rank 0 1", "rank 1 2"]
    assert titles[-1].splitlines() == ["10.5 s", "rank 0 2", "rank 1 3"]


def test_the_static_bundle_of_twelve_metrics_on_eight_ranks_fits_a_notebook(tmp_path):
    curves = {f"own{n}": (1, lambda step, n=n: math.sin(step * n) + 2) for n in range(12)}
    folder = reporting(tmp_path, 8, 150, **curves)

    bundle = static_bundle(folder, RunReader(folder).read_all(), State("succeeded", 0.0, 15.0))

    assert "image/png" in bundle
    assert sum(len(part.encode()) for part in bundle.values()) <= 60_000


def test_a_column_of_a_band_names_the_ranks_at_its_ends_and_its_evaluation():
    lines = {rank: series_of([(0.0, 10.0 - rank), (10.0, rank)]) for rank in range(9)}
    evaluated = series_of([(5.0, 0.5)])

    page = drawn([Chart("loss", lines, words.quantity, evaluated=evaluated)])
    titles = [title.splitlines() for title in re.findall(r"<title>([^<]*)</title>", page)]

    assert titles[0] == ["0.583 s", "max 10 (rank 0)", "median 6", "min 2 (rank 8)"]
    assert titles[-1] == ["10.4 s", "max 8 (rank 8)", "median 4", "min 0 (rank 0)", "evaluated 0.5"]


@pytest.mark.parametrize("kind", ["own", "reduced"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_twelve_metrics_fit_into_one_message(tmp_path, ranks, kind):
    curves = {f"{kind}{n}": (1, lambda step, n=n: math.sin(step * n) + 2) for n in range(12)}
    folder = reporting(tmp_path, ranks, 150, **curves)
    reader = RunReader(folder).read_all()

    page = run_html(folder, reader, RUNNING)

    assert page.count("<title>") >= 6 * page.count("<g transform")  # values under the pointer in every chart
    assert len(json.dumps(page, ensure_ascii=False).encode()) < 38_000  # as it is sent; a message's frame is 1 kB


def test_a_band_names_the_rank_that_stands_out_though_it_has_caught_up_at_the_end():
    draw = random.Random(0)
    lines = {rank: series_of((i, 10 + draw.random()) for i in range(60)) for rank in range(64)}
    alike = drawn([Chart("loss", lines, words.quantity)])
    lines[35] = series_of((i, 10.5 + (3 if 20 < i < 50 else 0)) for i in range(60))

    page = drawn([Chart("loss", lines, words.quantity)])

    assert re.findall(r">(rank \d+)</text>", alike) == []
    assert re.findall(r">(rank \d+)</text>", page) == ["rank 35"]


def test_a_band_is_told_to_a_screen_reader_as_a_range():
    lines = {rank: series_of([(0.0, rank + 1.0)]) for rank in range(9)}

    assert (
        ET.fromstring(drawn([Chart("loss", lines, words.quantity)]))[0].get("aria-label") == "loss: 1 to 9 on 9 lines"
    )


def test_what_was_changed_is_marked_in_every_chart_and_named_in_the_first():
    changed = {"changes": ((0.5, "lr=0.1"),)}
    page = drawn([Chart(n, {0: series_of([(0.0, 1.0), (1.0, 2.0)])}, words.quantity, **changed) for n in "ab"])

    assert page.count('stroke-dasharray="2 3" stroke-opacity=".6"') == 2
    assert page.count("lr=0.1") == 1


def test_runs_are_compared_by_their_curves_first(tmp_path):
    curves = {"test_accuracy": (10, lambda step: step / 100)}
    folders = [reporting(tmp_path / name, 2, 60, **curves) for name in "ab"]
    for folder, lr in zip(folders, ("0.1", "0.2"), strict=True):
        manifest = json.loads(folder.manifest.read_text())
        folder.manifest.write_text(json.dumps(manifest | {"parameters": {"lr": lr, "steps": "60"}}))
    comparison = compare([SimpleNamespace(folder=folder) for folder in folders])

    html = comparison._repr_mimebundle_()["text/html"]
    pictures = [base64.b64decode(data).decode() for data in re.findall(r"base64,([^\"]+)", html)]

    assert html.index("<img") < html.index("<table")
    titles = [re.search('aria-label="([^:]*)', picture)[1] for picture in pictures[:2]]
    assert titles == ["loss", "test_accuracy"]
    assert all(text in picture for picture in pictures[:2] for text in (">step<", ">60<"))
    assert re.search("the same in all runs: (loss [^,]*, )?ranks 2", html)
    assert [row["lr"] for row in comparison._rows()] == ["0.1", "0.2"]
    assert "steps" not in comparison._rows()[0]


def test_a_bar_says_how_a_run_ended_that_did_not_finish(tmp_path):
    folders = [reporting(tmp_path / name, 1, 30) for name in "ab"]
    State("succeeded", 0.0, 5.0).write(folders[0])
    State("failed", 0.0, 5.0, notice="`all_reduce` is left out").write(folders[1])

    page = compare([SimpleNamespace(folder=folder) for folder in folders])._repr_mimebundle_()["text/html"]

    pictures = [base64.b64decode(data).decode() for data in re.findall(r"base64,([^\"]+)", page)]
    bars = next(picture for picture in pictures if ">training time<" in picture)
    assert re.findall(">3 s([^<]*)<", bars) == ["", " · failed"]
    assert "<code>all_reduce</code> is left out" in page


def test_each_of_eight_compared_runs_has_a_line_in_each_of_six_charts(tmp_path):
    curves = {f"val_{n}": (10, lambda step: step / 100) for n in range(5)}
    folders = [reporting(tmp_path / str(i), 1, 30, **curves) for i in range(8)]

    page = compare([SimpleNamespace(folder=folder) for folder in folders])._repr_mimebundle_()["text/html"]
    pictures = [base64.b64decode(data).decode() for data in re.findall(r"base64,([^\"]+)", page)]

    assert [picture.count(' stroke-width="1.6" stroke-dasharray') for picture in pictures[:6]] == 6 * [8]


def test_a_comparison_that_is_too_wide_has_a_column_for_each_run(tmp_path):
    folders = [reporting(tmp_path / name, 2, 60) for name in "ab"]

    def heads(**parameters):
        for folder, value in zip(folders, ("0.1", "0.2"), strict=True):
            manifest = json.loads(folder.manifest.read_text())
            each = dict.fromkeys(parameters, value)
            folder.manifest.write_text(json.dumps(manifest | {"parameters": each}))
        runs = [SimpleNamespace(folder=RunFolder(folder.path)) for folder in folders]
        html = compare(runs)._repr_mimebundle_()["text/html"]
        return [re.sub("<.*?>", "", head) for head in re.findall("<th[^>]*>(.*?)</th>", html)]

    many = {f"a_long_parameter_{i}": None for i in range(12)}
    assert heads(lr=None)[:2] == ["run", "lr"]
    assert heads(**many)[0] == "run" and len(heads(**many)) == 3


def test_a_live_view_has_controls_of_charts_once_there_are_charts(whole_folder, tmp_path):
    for folder, shown in ((RunFolder.create(tmp_path, "starting"), "none"), (whole_folder, None)):
        view = Dashboard(folder, RUNNING, print, print, lambda: RUNNING, SimpleNamespace())
        view._draw()
        assert view._look.layout.display == shown
        close_widget(view.box)
