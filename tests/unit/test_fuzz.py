"""Whatever is in the files of a run, reading it ends, in bounded memory, with an answer or an error of labkit's own."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import threading
import tracemalloc
from contextlib import suppress

import pytest

import labkit
from labkit.errors import LabError
from labkit.launcher.causes.explain import find_cause, survived_errors
from labkit.launcher.stopping import requested
from labkit.record import RunFolder, RunReader, State
from labkit.view.comparison import runs_together
from labkit.view.live.page import run_html
from labkit.view.live.terminal import picture
from labkit.view.report import report_charts

pytestmark = pytest.mark.timeout(60)

DIGITS = "@a number of a hundred thousand digits@"
SCALARS = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2.5,
    2**63,
    -(2**63),
    10**400,
    -(10**400),
    10**4000,
    1e308,
    -1e308,
    5e-324,
    -0.0,
    math.nan,
    math.inf,
    -math.inf,
    DIGITS,
    "",
    "nan",
    "inf",
    "-inf",
    "text",
    "7",
    "-7",
    "\x00",
    "\ud800",
    "\x1b[31m",
    "x" * 10_000,
    "9" * 5000,
    "٣",
    "²",
    "a\nb",
    "\n",
    "\u2028",
    "%s{0}",
    "../../etc/passwd",
    "/dev/zero",
    "step",
    "end",
]
JUNK = [
    b"",
    b"\n",
    b" ",
    b"{",
    b"[]",
    b"{}",
    b"null",
    b"NaN",
    b"3",
    b'"text"',
    b"\xff\xfe",
    b"\x00" * 5000,
    b"\xed\xa0\x80",
    b"[" * 50_000,
    b'{"a":' * 50_000,
    b"9" * 100_000,
    b"-",
    b"1e999999999",
    b'{"t": 1, "t": []}',
    b"x" * 100_000,
]

GONE = {"pid": 4_000_000, "started": 1.0, "boot": "an earlier one", "host": "here"}
CALL = {
    "process_group": ["0", "default"],
    "collective_seq_id": 3,
    "profiling_name": "gloo:all_reduce",
    "input_sizes": [[4]],
    "input_dtypes": ["Float"],
    "retired": False,
    "is_p2p": False,
}
MANIFEST = {
    "format": 1,
    "id": "x",
    "name": "train",
    "created": "2026-01-02T03:04:05.678+00:00",
    "script": {"sha256": "0", "path": None},
    "cells": {"model": {"origin": "notebook cell In [3]"}},
    "parameters": {"steps": "9", "accumulate": "2", "checkpoint_dir": "here"},
    "args": ["--steps", "9"],
    "cwd": "/tmp",
    "torchrun": ["python", "-m"],
    "world_size": 2,
    "backend": "gloo",
    "devices": ["cpu"],
    "versions": {"python": "3.11", "torch": "2.13.0", "labkit": "0.1.0"},
    "platform": "linux",
    "git": None,
    "env": {"OMP_NUM_THREADS": "1"},
    "env_dropped": [],
    "retries": 0,
    "watchdog": None,
    "gpus": [],
}
CAUSE = {
    "kind": "exception",
    "rank": 1,
    "exception": "ValueError",
    "message": "boom",
    "sentence": "rank 1 failed",
    "line": 3,
    "cell": "model",
    "step": 4,
    "time_ns": 5,
    "traceback": ["a\n", "b\n"],
    "advice": "less",
}
STATE = {
    "state": "failed",
    "started": 1.0,
    "ended": 9.0,
    "exit_code": 1,
    "cause": CAUSE,
    "killed": 0,
    "checkpoint": "step-4",
    "notice": "no rank has made progress",
    "attempt": 2,
    "earlier": [{"cause": CAUSE, "checkpoint": None, "ended": 2.0}],
    "format": 1,
}
ERROR = {
    "rank": 1,
    "kind": "exception",
    "exception": "torch.OutOfMemoryError",
    "message": "CUDA out of memory\nmore",
    "traceback": ["Traceback\n", "boom\n"],
    "script_line": 3,
    "step": 4,
    "time_ns": 5,
    "out_of_memory": "device",
    "memory": {"allocated": 2**30, "reserved": 2**30, "total": 2**31, "free": 0, "peak": 2**30},
}
PHASES = {"input": 0.1, "forward": 0.2, "backward": 0.3, "optimizer": 0.1}
RECORDS = [
    {
        "k": "meta",
        "v": 1,
        "t": 100.0,
        "time": 1767323045.0,
        "rank": 0,
        "local_rank": 0,
        "world_size": 2,
        "host": "here",
        "pid": 1,
        "torch": "2.13.0",
        "device": "cuda:0",
    },
    {
        "k": "report",
        "t": 100.5,
        "total_steps": 9,
        "start_step": 2,
        "steps_per_epoch": 3,
        "parameters": 405898,
        "note": "words",
    },
    {"k": "model", "t": 101.0, "device": "cuda:0", "limit": 2**33, "parameters": 4, "gradients": 4, "optimizer": 8},
    *(
        {
            "k": "step",
            "t": 101.0 + i,
            "step": i,
            "n": 2,
            "seconds": [1.0, 0.4, 0.6],
            "samples": 8,
            "loss": 3.0 / i,
            "rss": 2**28,
            "allocated": 2**27,
            "reserved": 2**28,
            "peak": 2**28,
            "retries": 0,
        }
        | PHASES
        for i in range(1, 5)
    ),
    {"k": "report", "t": 110.0, "step": 4, "loss": 0.5, "epoch": 0},
    {"k": "report", "t": 111.0, "step": 4, "training_seconds": 9.0, "test_accuracy": 0.5, "stopped": "words"},
    {"k": "end", "t": 112.0, "step": 4, "outcome": "finished", "dropped": 0},
]
HOST = [
    {
        "k": "meta",
        "v": 1,
        "t": 1.0,
        "time": 1.0,
        "host": "here",
        "cores": 2,
        "memory_total": 2**30,
        "devices": [{"name": "made up", "uuid": "0", "memory_total": 2**30}],
    },
    {
        "k": "host",
        "t": 2.0,
        "cpu": 50.0,
        "memory_used": 2**29,
        "devices": [{"utilisation": 50, "memory_used": 2**29, "power": 70.0, "temperature": 60}],
    },
]
LEFT_RUNNING = {"processes": ["`sleep …` (pid 7)"], "until": 1.0, "ended": 2.0, "killed": ["`sleep …` (pid 7)"]}
THREAD = """Exception in thread Thread-1 (train):
Traceback (most recent call last):
  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner
    self.run()
  File "train.py", line 4, in train
    raise ValueError("boom")
ValueError: boom
"""
SCRIPT = """# %% parameters
parser.add_argument("--steps", type=int, default=9)
parser.add_argument("--accumulate", type=int, default=1)
# %% model
x = 1
"""
TORCHRUN = "".join(
    f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 7)\n" for rank, code in ((0, -6), (1, -9))
)
STACKS = (
    'Fatal Python error: Aborted\n\nCurrent thread 0x00007f (most recent call first):\n  File "x.py", line 3 in f\n'
)


def whole_run(path):
    """A run with every file that reading looks at; two ranks, the second of which raised."""
    folder = RunFolder(path)
    folder.hosts.mkdir(parents=True)
    for rank in (0, 1):
        folder.rank(rank).mkdir(parents=True)
        folder.metrics(rank).write_bytes(lines(RECORDS[: -rank or None]))
        folder.log(rank).write_text("step 8\n")
        folder.log(rank, "stderr").write_text("terminate called\n  what():  boom\n")
        folder.stacks(rank).write_text(STACKS)
        folder.heartbeat(rank).write_bytes(dumped({"time": 1.0, "pid": 7, "step": 8, "rss": 2**28, "moved": 1.0}))
        folder.collectives(rank).write_bytes(dumped({"collectives": [CALL]}))
    folder.error(1).write_bytes(dumped(ERROR))
    (folder.hosts / "here.jsonl").write_bytes(lines(HOST))
    folder.manifest.write_bytes(dumped(MANIFEST))
    folder.state.write_bytes(dumped(STATE))
    folder.agent.write_bytes(dumped({"supervisor": GONE, "agent": GONE, "oom_kills": 0}))
    folder.left_running.write_bytes(dumped(LEFT_RUNNING))
    folder.stop_request.write_bytes(dumped({"time": 1.0, "pid": 7, "grace": 5.0}))
    folder.script.write_text(SCRIPT)
    folder.command.write_text("torchrun train.py\n")
    folder.torchrun_log.write_text(TORCHRUN)
    folder.supervisor_log.write_text("")
    return folder


def dumped(value):
    return json.dumps(value).replace(json.dumps(DIGITS), "9" * 100_000).encode()


def lines(records):
    return b"".join(dumped(record) + b"\n" for record in records)


def anything(draw, depth=2):
    """Any JSON value, the odd ones first."""
    if depth and draw.random() < 0.25:
        return [anything(draw, depth - 1) for _ in range(draw.randrange(4))]
    if depth and draw.random() < 0.25:
        return {str(draw.choice(SCALARS)): anything(draw, depth - 1) for _ in range(draw.randrange(4))}
    return draw.choice(SCALARS)


def places_in(value, place=()):
    """The keys that lead to each value within a value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*place, key)
        yield from places_in(value[key], (*place, key))


def altered(draw, value, turn):
    """The value with another one, or none, in one of its places: each in its turn."""
    value = json.loads(json.dumps(value))
    places = list(places_in(value))
    random.Random(0).shuffle(places)
    *way, last = places[turn % len(places)]
    within = value
    for key in way:
        within = within[key]
    if draw.random() < 0.2:
        del within[last]
    else:
        within[last] = anything(draw)
    return value


def torn(draw, data):
    """The bytes cut off, flipped, doubled or replaced."""
    at = draw.randrange(len(data) + 1)
    return draw.choice(
        [
            lambda: data[:at],
            lambda: data[at:],
            lambda: data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :],
            lambda: data[:at] + draw.randbytes(draw.randrange(1, 40)) + data[at:],
            lambda: data + data,
            lambda: b"\xef\xbb\xbf" + data,
            lambda: data.decode("utf-8", "replace").encode("utf-16"),
            lambda: draw.choice(JUNK),
        ]
    )()


def foreign(draw, value, turn):
    """Bytes in place of a file of one JSON value, of one per line, or of text."""
    if isinstance(value, str):
        return torn(draw, value.encode())
    if isinstance(value, list):
        written = [dumped(record) for record in altered(draw, value, turn)]
        if draw.random() < 0.3:
            at = draw.randrange(len(written))
            written[at] = torn(draw, written[at])
        if draw.random() < 0.2:
            draw.shuffle(written)
        return b"\n".join(written) + b"\n" * draw.randrange(2)
    if draw.random() < 0.1:
        return torn(draw, dumped(value))
    return dumped(anything(draw, 3) if draw.random() < 0.1 else altered(draw, value, turn))


FILES = {
    "run.json": (lambda f: f.manifest, MANIFEST),
    "state.json": (lambda f: f.state, STATE),
    "state.json of a run that goes on": (lambda f: f.state, STATE | {"state": "running", "ended": None}),
    "agent.json": (lambda f: f.agent, {"supervisor": GONE, "agent": GONE, "oom_kills": 0}),
    "error.json": (lambda f: f.error(1), ERROR),
    "metrics.jsonl": (lambda f: f.metrics(0), RECORDS),
    "hosts": (lambda f: f.hosts / "here.jsonl", HOST),
    "heartbeat.json": (lambda f: f.heartbeat(0), {"time": 1.0, "pid": 7, "step": 8, "rss": 2**28, "moved": 1.0}),
    "collectives.json": (lambda f: f.collectives(0), {"collectives": [CALL, CALL]}),
    "script.py": (lambda f: f.script, SCRIPT),
    "command.txt": (lambda f: f.command, "torchrun train.py\n"),
    "torchrun.log": (lambda f: f.torchrun_log, TORCHRUN),
    "stacks.txt": (lambda f: f.stacks(1), STACKS),
    "a log": (lambda f: f.log(0, "stderr"), "line\n" * 20),
    "stderr of a thread": (lambda f: f.log(0, "stderr"), THREAD),
    "left-running.json": (lambda f: f.left_running, LEFT_RUNNING),
}


def read_figures(run, draw):
    reader = RunReader(run.folder).read_all()
    report_charts(reader)
    runs_together({"a": reader}).to_json()


def read_cause(run, draw):
    if draw.random() < 0.5:
        run.folder.error(1).unlink(missing_ok=True)
    cause = find_cause(run.folder, run.folder.latest, draw.choice([1, 2, 255, -9, -15, -35, -64]), None)
    assert isinstance(cause["sentence"], str)
    json.dumps(dict(cause))  # it is kept in state.json


READERS = {
    "status": (300, lambda run, draw: (repr(run.status()), run.status().seconds, run.status().is_final)),
    "text": (150, lambda run, draw: repr(run)),
    "list": (150, lambda run, draw: (repr(labkit.runs()), labkit.runs()._repr_html_())),
    "metrics": (150, lambda run, draw: run.metrics()),
    "logs": (60, lambda run, draw: (run.logs(), run.logs(rank=1, stream="stderr"))),
    "wait": (150, lambda run, draw: run.wait(timeout=0)),
    "page": (150, lambda run, draw: run_html(run.folder, RunReader(run.folder).read_all(), State.read(run.folder))),
    "terminal": (150, lambda run, draw: picture(RunReader(run.folder).read_all(), State.read(run.folder))),
    "figures": (30, read_figures),
    "report": (20, lambda run, draw: run.report()),
    "comparison": (150, lambda run, draw: (str(c := labkit.compare([run, run])), c._repr_mimebundle_(), c.table)),
    "script": (60, lambda run, draw: (str(run.script), run.command)),
    "cause": (150, read_cause),
    "end": (150, lambda run, draw: run.is_over),
    "threads": (150, lambda run, draw: survived_errors(run.folder, run.folder.latest, (0, 1))),
}
# The files that a reader has nothing to do with are left out.
LOOKS_AT = {
    "status": ["state.json", "state.json of a run that goes on", "agent.json"],
    "list": ["run.json", "state.json", "state.json of a run that goes on", "agent.json"],
    "logs": ["run.json", "a log"],
    "metrics": ["run.json", "metrics.jsonl"],
    "figures": ["metrics.jsonl"],
    "script": ["run.json", "script.py", "command.txt"],
    "wait": ["state.json", "state.json of a run that goes on", "agent.json", "run.json"],
    "text": [
        "run.json",
        "state.json",
        "state.json of a run that goes on",
        "metrics.jsonl",
        "hosts",
        "left-running.json",
    ],
    "terminal": ["run.json", "state.json", "state.json of a run that goes on", "metrics.jsonl", "a log"],
    "page": [
        "run.json",
        "state.json",
        "state.json of a run that goes on",
        "metrics.jsonl",
        "hosts",
        "error.json",
        "a log",
        "left-running.json",
    ],
    "end": ["state.json", "agent.json", "left-running.json"],
    "threads": ["run.json", "script.py", "stderr of a thread"],
    "report": ["run.json", "state.json", "metrics.jsonl", "error.json", "script.py", "command.txt"],
    "comparison": ["run.json", "state.json", "metrics.jsonl"],
    "cause": [
        "run.json",
        "agent.json",
        "error.json",
        "metrics.jsonl",
        "heartbeat.json",
        "collectives.json",
        "script.py",
        "torchrun.log",
        "stacks.txt",
        "a log",
    ],
}


def complaint(read, run, draw):
    """What reading raised that is neither labkit's own nor the end of a time that was given; "" when nothing."""
    try:
        read(run, draw)
    except (LabError, TimeoutError):
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    return ""


@pytest.mark.parametrize(("reader", "file"), [(reader, file) for reader, files in LOOKS_AT.items() for file in files])
def test_whatever_a_file_holds_reading_the_run_raises_nothing_but_our_own(runs_dir, reader, file):
    folder = whole_run(runs_dir / "20260102T030405Z-demo-0a1b")
    path_of, value = FILES[file]
    path, (rounds, read) = path_of(folder), READERS[reader]
    if file == "agent.json":  # asked of only while a run goes on
        folder.state.write_bytes(dumped(STATE | {"state": "running", "ended": None, "cause": None}))
    heard = {}

    for seed in range(rounds):
        draw = random.Random(f"{file} {seed}")
        folder.error(1).write_bytes(dumped(ERROR))
        path.write_bytes(foreign(draw, value, seed))
        if (said := complaint(read, labkit.Run(folder), draw)) not in ("", *heard):
            heard[said] = seed

    assert not heard, f"by seed: {heard}"


@pytest.mark.parametrize("seed", range(3))
def test_whatever_run_json_holds_a_run_is_attached_or_refused(runs_dir, seed):
    draw = random.Random(seed)
    folder = whole_run(runs_dir / "20260102T030405Z-demo-0a1b")
    refused = 0

    for turn in range(100):
        folder.manifest.write_bytes(foreign(draw, MANIFEST, turn))
        try:
            assert labkit.attach(folder.id).id == labkit.attach("latest").id == folder.id
        except LabError as error:
            assert "not a run folder this labkit can read" in str(error)
            refused += 1

    assert 0 < refused < 100


def test_an_undamaged_run_is_read_by_every_reader(runs_dir):
    folder = whole_run(runs_dir / "20260102T030405Z-demo-0a1b")
    run = labkit.attach(folder.path)

    assert {name: complaint(read, run, random.Random(0)) for name, (_, read) in READERS.items()} == dict.fromkeys(
        READERS, ""
    )
    assert "rank 1 failed" in repr(run)
    assert find_cause(folder, folder, 1)["sentence"].startswith("rank ")
    assert sorted(run.metrics()["rank"].unique()) == [0, 1]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("instead", ["nothing", "a folder", "a link to itself"])
def test_a_file_that_is_not_there_is_no_reason_to_fall(runs_dir, file, instead):
    folder = whole_run(runs_dir / "20260102T030405Z-demo-0a1b")
    path = FILES[file][0](folder)
    path.unlink()
    if instead == "a folder":
        path.mkdir()
    elif instead == "a link to itself":
        path.symlink_to(path.name)

    heard = {
        name: said
        for name, (_, read) in READERS.items()
        if (name, file) != ("cause", "error.json")  # which takes it away by itself
        and (name != "figures" or file in LOOKS_AT[name])
        and (said := complaint(read, labkit.Run(folder), random.Random(1)))
    }

    assert not heard


@pytest.mark.parametrize("file", ["state.json", "agent.json", "metrics.jsonl", "error.json", "hosts", "a log"])
def test_a_pipe_in_place_of_a_file_does_not_hang_its_reader(runs_dir, file):
    folder = whole_run(runs_dir / "20260102T030405Z-demo-0a1b")
    if file == "agent.json":
        folder.state.write_bytes(dumped(STATE | {"state": "running", "ended": None, "cause": None}))
    path = FILES[file][0](folder)
    path.unlink()
    os.mkfifo(path)
    over = threading.Event()

    def read():
        run_html(folder, RunReader(folder).read_all(), State.read(folder))
        over.set()

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    ended = over.wait(3)
    while reading.is_alive():  # whoever waits for a writer is given one
        with suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        reading.join(0.02)

    assert ended


@pytest.mark.parametrize(
    "entry",
    [
        "ranks/٣",
        "ranks/999999999999",
        "ranks/0/sub",
        "attempts/0",
        "attempts/999999999",
        "attempts/٢",
        "hosts/sub.jsonl",
        "checkpoints/step-٣",
        "torchrun/x/y",
    ],
)
def test_folders_that_nobody_expects_are_no_reason_to_fall(runs_dir, entry):
    folder = whole_run(runs_dir / "20260102T030405Z-demo-0a1b")
    (folder.path / entry).mkdir(parents=True)

    assert {name: complaint(read, labkit.Run(folder), random.Random(2)) for name, (_, read) in READERS.items()} == (
        dict.fromkeys(READERS, "")
    )


@pytest.mark.parametrize("code", [-1, -9, -11, -15, -35, -63, -65, 0, 1, 255, 10**20])
def test_whatever_an_exit_code_a_cause_is_found(runs_dir, code):
    folder = whole_run(runs_dir / "20260102T030405Z-demo-0a1b")
    folder.error(1).unlink()
    folder.torchrun_log.write_text(TORCHRUN.replace("-9", str(code)))

    for reported in {1, max(code, -70)}:
        assert find_cause(folder, folder, reported)["sentence"]
    folder.torchrun_log.write_text("")
    assert find_cause(folder, folder, code)["sentence"]


def test_a_stop_request_of_any_content_gives_a_time_to_wait_or_none(runs_dir):
    folder = whole_run(runs_dir / "20260102T030405Z-demo-0a1b")
    heard = {}

    for seed in range(300):
        folder.stop_request.write_bytes(foreign(random.Random(seed), {"time": 1.0, "pid": 7, "grace": 5.0}, seed))
        try:
            request = requested(folder)
            grace = request and request.grace
            said = "" if grace is None or 0 <= grace < 1e6 else f"waits {grace} s"
        except Exception as error:
            said = type(error).__name__
        heard.setdefault(said, seed)

    assert "" in heard
    heard.pop("")
    assert not heard, f"by seed: {heard}"


def test_a_clock_that_goes_backwards_loses_no_step(runs_dir):
    folder = whole_run(runs_dir / "20260102T030405Z-demo-0a1b")
    draw = random.Random(3)
    times = [100.0 + draw.uniform(-1e6, 1e6) for _ in range(500)]
    steps = [
        {"k": "step", "t": t, "step": i, "n": 1, "seconds": [1.0] * 3, "loss": 1.0} for i, t in enumerate(times, 1)
    ]
    folder.metrics(0).write_bytes(lines([RECORDS[0], *steps]))

    history = RunReader(folder).read_all().ranks[0]
    drawn = [x for x, *_ in history.series["loss"].points()]

    assert (history.step, history.totals["steps"], history.undecodable) == (500, 500.0, 0)
    assert drawn == sorted(drawn)
    assert drawn[0] >= 0
    assert len(labkit.Run(folder).metrics().query("rank == 0")) == 500


@pytest.mark.parametrize("bad", [1e308, -1e308, 1e15, 10**300], ids=repr)
def test_one_impossible_time_does_not_hide_what_follows(runs_dir, bad):
    folder = whole_run(runs_dir / "20260102T030405Z-demo-0a1b")
    folder.metrics(0).write_bytes(lines([RECORDS[0], {"k": "report", "t": bad, "note": "x"}, *RECORDS[1:]]))

    history = RunReader(folder).read_all().ranks[0]

    assert history.step == 6  # two before it was resumed
    assert history.latest["loss"] == 0.5
    assert "<svg" in run_html(folder, RunReader(folder).read_all(), State.read(folder))


def peak_of(act):
    """The bytes that an act held at its worst."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_lines_of_two_megabytes_are_counted_and_not_kept(runs_dir):
    folder = whole_run(runs_dir / "20260102T030405Z-demo-0a1b")
    long = [
        b'{"t": 1, "k": "report", "x": "' + b"x" * (2 << 20) + b'"}\n',
        b"\0" * (2 << 20) + b"\n",
        b'{"t": 1, "x": ' + b"[" * (2 << 20) + b"\n",
    ]
    with folder.metrics(0).open("wb") as file:
        file.writelines([*long * 4, lines(RECORDS)])
    reader = RunReader(folder)

    assert peak_of(reader.read_all) < 40 << 20
    assert reader.ranks[0].undecodable == 12
    assert reader.ranks[0].step == 6


def test_reading_a_run_three_times_as_long_takes_no_more_memory(runs_dir):
    def peak(count):
        folder = whole_run(runs_dir / f"20260102T030405Z-demo-{count}")
        step = RECORDS[3] | {"note": "x" * 2000}
        folder.metrics(0).write_bytes(lines(step | {"t": 101.0 + i, "step": i} for i in range(count)))
        return peak_of(RunReader(folder).read_all)

    assert peak(12_000) < 1.3 * peak(4_000)


def test_reports_of_a_megabyte_each_are_not_all_kept(runs_dir):
    folder = whole_run(runs_dir / "20260102T030405Z-demo-0a1b")
    with folder.metrics(0).open("wb") as file:
        for i in range(60):
            file.write(dumped({"k": "report", "t": 100.0 + i, "step": i, "text": "x" * 900_000}) + b"\n")

    assert peak_of(RunReader(folder).read_all) < 40 << 20


@pytest.mark.parametrize("file", ["state.json", "agent.json", "error.json", "heartbeat.json"])
def test_a_small_file_that_is_huge_is_not_read_whole(runs_dir, file):
    folder = whole_run(runs_dir / "20260102T030405Z-demo-0a1b")
    if file == "agent.json":
        folder.state.write_bytes(dumped(STATE | {"state": "running", "ended": None, "cause": None}))
    path = FILES[file][0](folder)
    with path.open("wb") as sparse:
        sparse.truncate(96 << 20)

    def read():
        repr(labkit.runs())
        run_html(folder, RunReader(folder), State.read(folder))
        with suppress(Exception):  # other tests are about those
            find_cause(folder, folder, -9)

    assert peak_of(read) < 48 << 20


def test_many_damaged_runs_hide_no_good_one(runs_dir):
    draw = random.Random(4)
    good = whole_run(runs_dir / "20260102T030405Z-good-0000")
    for i in range(40):
        folder = runs_dir / f"20260102T0304{i:02}Z-bad-{i:04}"
        shutil.copytree(good.path, folder)
        (folder / "run.json").write_bytes(foreign(draw, MANIFEST, i))
        (folder / "state.json").write_bytes(draw.choice([*JUNK, foreign(draw, STATE | {"cause": None}, i)]))

    listed = labkit.runs()

    assert len(listed) == 41
    assert sum(line.startswith(good.id) for line in repr(listed).splitlines()) == 1
    assert good.id.partition("-")[2] in listed._repr_html_()
