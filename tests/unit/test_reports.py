"""What a script logs to the logger "metrics", whatever it does with logging."""

from __future__ import annotations

import enum
import json
import logging
import logging.config
import os
import re
import subprocess
import sys
import threading
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.worker import metrics_logger as module
from labkit.worker.metrics_logger import BURST, MOST_VALUES, RECORDS_A_SECOND, Reports, listen
from labkit.worker.recorder import Recorder


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


class Colour(enum.Enum):
    RED = 1


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def recorder(tmp_path):
    recorder = Recorder(tmp_path / "metrics.jsonl")
    yield recorder
    os.close(recorder.file.descriptor)


@pytest.fixture
def written(tmp_path):
    """The records so far, less what all of them have."""

    def read():
        records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert all(record.pop("k") == "report" and record.pop("t") > 0 for record in records)
        return records

    return read


@pytest.fixture
def metrics(recorder, clock):
    """The logger, heard, as a script finds it; afterwards all loggers are as they were before."""
    logger = logging.getLogger("metrics")
    known = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    before = [(each, each.__dict__.copy(), each.handlers[:]) for each in (logging.root, *known)]
    logger.reports = Reports(recorder)
    listen(logger, logger.reports)
    yield logger
    for each, attributes, handlers in before:
        each.__dict__.clear()
        each.__dict__.update(attributes, handlers=handlers)
        each._cache.clear()


def test_the_mapping_that_a_sentence_is_made_of_is_a_record(metrics, written):
    metrics.info("step %(step)d f1 %(f1).3f", {"step": 3, "f1": 0.5})
    metrics.info({"step": 4, "f1": 0.75})
    metrics.warning("%(f1)s", {"f1": 0.25})
    metrics.log(25, {"f1": 0.125})

    assert written() == [{"step": 3, "f1": 0.5}, {"step": 4, "f1": 0.75}, {"f1": 0.25}, {"f1": 0.125}]


def test_what_is_no_mapping_of_level_info_is_none(metrics, written):
    metrics.info("words")
    metrics.info("%s and %s", {"a": 1}, {"b": 2})
    metrics.info({"a": "%s"}, 1)
    metrics.info({})
    metrics.debug({"f1": 0.5})
    logging.getLogger("metrics.of.others").warning({"f1": 0.5})
    logging.getLogger("others").warning({"f1": 0.5})

    assert written() == []


def test_a_level_that_the_script_has_lowered_is_recorded_too(metrics, written):
    metrics.setLevel(logging.DEBUG)
    metrics.debug({"f1": 0.5})

    assert written() == [{"f1": 0.5}]


VERSION = {"version": 1}
LOUD = {"handlers": {"h": {"class": "logging.StreamHandler"}}, "root": {"level": "DEBUG", "handlers": ["h"]}}
CONFIGURATIONS = {
    "none": lambda: None,
    "basicConfig": lambda: logging.basicConfig(force=True),
    "errors only": lambda: logging.basicConfig(level="ERROR", force=True),
    "dictConfig": lambda: logging.config.dictConfig(VERSION | {"disable_existing_loggers": True}),
    "another's dictConfig": lambda: logging.config.dictConfig(VERSION | LOUD),
    "dictConfig of it": lambda: logging.config.dictConfig(
        VERSION | LOUD | {"loggers": {"metrics": {"level": "CRITICAL", "handlers": [], "propagate": False}}}
    ),
    "level": lambda: logging.getLogger("metrics").setLevel("ERROR"),
    "disabled": lambda: setattr(logging.getLogger("metrics"), "disabled", True),
    "filter": lambda: logging.getLogger("metrics").addFilter(lambda record: False),
    "no handlers": lambda: logging.getLogger("metrics").handlers.clear(),
    "not passed on": lambda: setattr(logging.getLogger("metrics"), "propagate", False),
    "disable": lambda: logging.disable(),
}


@pytest.mark.parametrize("configure", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_it_is_recorded_however_logging_is_configured(metrics, written, configure):
    try:
        configure()
        metrics.info("f1 %(f1)s", {"f1": 0.5})
        logging.LoggerAdapter(metrics, {}).info("f1 %(f1)s", {"f1": 0.75})
    finally:
        logging.disable(logging.NOTSET)

    assert written() == [{"f1": 0.5}, {"f1": 0.75}]


SCRIPT = """
import logging, logging.config, sys
if sys.argv[1] == "heard":
    import os
    os.environ["RANK"] = "0"
    from pathlib import Path
    from labkit.worker.recorder import Recorder
    from labkit.worker.metrics_logger import Reports, listen
    listen(logging.getLogger("metrics"), Reports(Recorder(Path(sys.argv[2]))))
metrics = logging.getLogger("metrics")
metrics.info("before")
metrics.warning("last resort %(f1)s", {"f1": 0.5})
if not metrics.handlers and not metrics.hasHandlers():
    print(metrics.level, metrics.getEffectiveLevel(), metrics.disabled, logging.getLogger().handlers, type(metrics))
logging.basicConfig(format="%(name)s %(funcName)s %(lineno)d %(message)s", stream=sys.stdout)
def told(level):
    metrics.setLevel(level)
    metrics.info("f1 %(f1).2f", {"f1": 0.5})
    metrics.info("f1 %(f1).2f", {"f1": 0.5}, stacklevel=2)
    try:
        1 / 0
    except ZeroDivisionError:
        metrics.exception("f1 %(f1).2f", {"f1": 0.5})
    metrics.info("wrong %(f2)d", {"f1": 0.5})
told("ERROR")
told("INFO")
metrics.addFilter(lambda record: False)
told("INFO")
"""


def test_what_a_script_prints_is_the_same_with_and_without_a_listener(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    alone, heard = (
        subprocess.run([sys.executable, tmp_path / "script.py", how, tmp_path / "m"], capture_output=True, text=True)
        for how in ("alone", "heard")
    )

    assert alone.stdout == heard.stdout
    assert re.search(r"^metrics told \d+ f1 0.50$", heard.stdout, re.M)
    assert sentences(heard.stderr) == sentences(alone.stderr)
    assert len((tmp_path / "m").read_text().splitlines()) == 1 + 3 * 4


def sentences(text):
    """Less the stack that logging shows of a record with a wrong format: it has a frame of ours."""
    return [line for line in text.splitlines() if not line.startswith(" ")]


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (1, 1),
        (True, True),
        (None, None),
        ("words", "words"),
        ("x" * 5000, "x" * 200),
        (0.5, 0.5),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("words"), "words"),
        (np.longdouble(0.5), 0.5),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([3]), 3),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor(float("inf"), dtype=torch.bfloat16), "inf"),
        (Fraction(1, 2), 0.5),
        (10**30, 1e30),
        (1j, "1j"),
        (torch.float32, "torch.float32"),
        (Colour.RED, "Colour.RED"),
    ],
    ids=repr,
)
def test_scalars_of_any_kind_are_kept(metrics, recorder, written, value, kept):
    metrics.info({"step": 1, "value": value})

    assert written() == [{"step": 1, "value": kept}]
    assert recorder.dropped == 0


class Broken:
    def __str__(self):
        raise RuntimeError("broken")


class BrokenScalar:
    shape = ()

    def item(self):
        raise RuntimeError("broken")


@pytest.mark.parametrize(
    "value",
    [
        [1],
        (1, 2),
        {"a": 1},
        {1},
        b"bytes",
        torch.ones(2),
        np.ones((2, 2)),
        torch.empty((), device="meta"),
        10**400,
        Broken(),
        BrokenScalar(),
        torch.nn.Sequential(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_scalar_is_left_out_and_counted_and_the_rest_is_kept(metrics, recorder, written, value, capfd):
    metrics.info({"step": 1, "value": value, "f1": 0.5})

    assert written() == [{"step": 1, "f1": 0.5}]
    assert recorder.dropped == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("step", [3, 3.0, np.int32(3), torch.tensor(3), torch.tensor(3.0)], ids=repr)
def test_a_step_is_a_whole_number_whatever_held_it(metrics, written, step):
    metrics.info({"step": step})

    assert json.dumps(written()) == '[{"step": 3}]'


def test_names_of_the_records_own_are_moved_aside_and_others_are_text(metrics, written):
    metrics.info({"k": 1, "t": 2, 3: 4, ("a", "b"): 5, "x" * 5000: 6})

    assert written() == [{"k_": 1, "t_": 2, "3": 4, "('a', 'b')": 5, "x" * 200: 6}]


def test_a_record_of_very_many_values_is_bounded(metrics, recorder, written):
    metrics.info({f"weight {i}": i for i in range(MOST_VALUES + 7)})

    assert [len(record) for record in written()] == [MOST_VALUES]
    assert recorder.dropped == 7


class BrokenMapping(dict):
    def items(self):
        raise RuntimeError("broken")


def test_a_mapping_that_cannot_be_read_and_a_disk_that_is_full_cost_measurements_only(metrics, recorder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    metrics.info("words", BrokenMapping(a=1))
    monkeypatch.setattr(os, "write", full)
    metrics.info({"f1": 0.5})

    assert recorder.dropped == 2


@given(
    st.dictionaries(
        st.text() | st.integers() | st.none(),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.binary()
        | st.lists(st.integers())
        | st.complex_numbers(),
        max_size=8,
    )
)
def test_any_mapping_is_a_line_of_json(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("any") / "metrics.jsonl"
    recorder = Recorder(path)
    reports = Reports(recorder)
    reports.take(values, ())
    reports.flush(everything=True)
    os.close(recorder.file.descriptor)

    assert all(json.loads(line)["k"] == "report" for line in path.read_text().splitlines())


def test_a_short_run_is_written_record_by_record(metrics, written, clock):
    for step in range(BURST):
        metrics.info({"step": step, "loss": 1.0})

    assert [record["step"] for record in written()] == list(range(BURST))


def flood(metrics, clock, seconds, rate):
    for i in range(int(seconds * rate)):
        clock.now += 1 / rate
        yield i


def test_a_flood_grows_with_time_and_ends_with_its_last_record(metrics, written, clock):
    for i in flood(metrics, clock, seconds=60, rate=1000):
        metrics.info({"step": i, "loss": i / 2})
    metrics.reports.flush(everything=True)

    assert len(written()) <= BURST + 60 * RECORDS_A_SECOND + 1
    assert written()[-1] == {"step": 59_999, "loss": 59_999 / 2}
    assert [record["step"] for record in written()] == sorted(record["step"] for record in written())


def test_the_newest_value_of_each_name_survives_a_flood_with_its_step(metrics, written, clock):
    for i in flood(metrics, clock, seconds=1, rate=2000):
        metrics.info({"step": i, "loss": float(i)})
        if i % 500 == 499:
            metrics.info({"step": i, "val_loss": float(i)})
            metrics.info({"epoch": i // 500, "epoch_seconds": 0.25})
    metrics.reports.flush(everything=True)

    assert {r["step"]: r["val_loss"] for r in written() if "val_loss" in r} == {s: s for s in (499, 999, 1499, 1999)}
    assert [r["epoch"] for r in written() if "epoch_seconds" in r] == [0, 1, 2, 3]
    assert all(record["loss"] == record["step"] for record in written() if "loss" in record)


def test_what_waits_is_written_as_soon_as_there_is_room(metrics, written, clock):
    for step in range(BURST + 5):
        metrics.info({"step": step})
    metrics.reports.flush()
    assert written()[-1] == {"step": BURST - 1}
    clock.now += 0.1
    metrics.reports.flush()
    assert written()[-1] == {"step": BURST + 4}
    metrics.reports.flush()
    assert len(written()) == BURST + 1


def test_a_second_with_fewer_records_makes_room(metrics, written, clock):
    for step in range(BURST):
        metrics.info({"step": step})
    clock.now += 3
    for step in range(BURST, BURST + 40):
        metrics.info({"step": step})

    assert written()[-1] == {"step": BURST + 3 * RECORDS_A_SECOND - 1}


def test_a_flood_of_ever_new_names_is_kept_in_bounded_memory(metrics, recorder, written, clock):
    for i in range(20 * MOST_VALUES):
        metrics.info({"step": i, f"loss of step {i}": 1.0})

    assert sum(map(len, metrics.reports._waiting.values())) <= MOST_VALUES
    assert recorder.dropped > 0
    metrics.reports.flush(everything=True)
    assert written()[-1] == {"step": i, f"loss of step {i}": 1.0}


def test_threads_may_log_at_once(metrics, written, recorder):
    def log(thread):
        for i in range(500):
            metrics.info({"step": i, f"value {thread}": i})

    threads = [threading.Thread(target=log, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    metrics.reports.flush(everything=True)
    newest = {}
    for record in written():
        newest |= record

    assert {newest[f"value {i}"] for i in range(8)} == {499}
    assert recorder.dropped == 0


def test_a_process_that_a_rank_forks_is_not_heard(metrics, written):
    for step in range(BURST + 1):
        metrics.info({"step": step})
    if not (child := os.fork()):
        metrics.info({"step": 7})
        metrics.reports.flush(everything=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

    assert len(written()) <= BURST + 1
    assert {"step": 7} in written()[:8]
    assert {"step": 7} not in written()[8:]
