"""What else a machine does during a run: measured from outside, recorded, and stated where it may matter."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys

import psutil
import pytest

from labkit.hardware import container
from labkit.launcher import machine_load, sampler
from labkit.launcher.machine_load import MachineLoad, ProcessorTime, busy_seconds, on_battery
from labkit.record import HostHistory, RunFolder, RunReader, State
from labkit.view.comparison import compare
from labkit.view.live.disturbances import disturbances
from labkit.view.live.verdict import verdict

RUNNING, ENDED = State("running", 0.0), State("succeeded", 0.0, 60.0, 0)
# A process with a child at a time, each of which is gone before the next look.
PARENT = """
import subprocess, sys
for _ in range(3):
    subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"])
    print("next", flush=True)
    sys.stdin.readline()
"""


def processor_seconds():
    """Of the children of this process that have exited."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_time_of_processes_that_are_gone_before_they_are_looked_at_counts_once():
    before, own, counted = processor_seconds(), ProcessorTime(), 0.0
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        process = psutil.Process(parent.pid)
        for _ in range(3):
            parent.stdout.readline()
            counted += own.add([process])
            parent.stdin.write(b"\n")
            parent.stdin.flush()

    assert counted == pytest.approx(processor_seconds() - before, abs=0.15)  # ticks, and its exit


def test_a_child_that_was_seen_alive_is_not_counted_again_when_its_parent_reaps_it():
    wait = "input(); sum(range(40_000_000)); print('done', flush=True); input()"  # is seen while it waits
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {wait!r}]); print(flush=True); input()"
    before, own = processor_seconds(), ProcessorTime()
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        process = psutil.Process(parent.pid)
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        parent.stdout.readline()
        counted = own.add([process, *process.children()])
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        parent.stdout.readline()
        counted += own.add([process])

    assert counted == pytest.approx(processor_seconds() - before, abs=0.15)


def test_what_another_process_uses_is_not_the_runs():
    load = MachineLoad([])
    start = busy_seconds(load.cores)
    before = processor_seconds()
    subprocess.run([sys.executable, "-c", "sum(range(5_000_000))"], check=True)
    read = load.read([])

    assert busy_seconds(load.cores) - start >= processor_seconds() - before - 0.05
    assert read["busy"] > 0 and read["own"] == 0.0


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/a\n", {"a/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "100000 100000"}, 1.0),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("1:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"}, 0.5),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("4:memory:/x\n", {"cpu/x/cpu.cfs_quota_us": "50000"}, None),
    ],
)
def test_in_a_container_that_may_use_less_than_the_cores_it_cannot_be_told(tmp_path, monkeypatch, own, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(container, "GROUPS", tmp_path)
    monkeypatch.setattr(container, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine_load, "usable_cores", lambda: [0, 0])

    assert container.cpu_limit() == expected
    assert (MachineLoad([]).read([])["busy"] is None) == (expected is not None)


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({}, None),
        ({"AC": {"type": "Mains", "online": "1"}, "BAT0": {"type": "Battery", "status": "Charging"}}, False),
        ({"AC": {"type": "Mains", "online": "0"}, "BAT0": {"type": "Battery", "status": "Discharging"}}, True),
        ({"hidpp_battery_0": {"type": "Battery", "status": "Discharging", "scope": "Device"}}, None),  # a mouse
    ],
)
def test_whether_a_made_up_laptop_runs_on_its_battery(tmp_path, monkeypatch, supplies, expected):
    for name, files in supplies.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text + "\n")
    monkeypatch.setattr(machine_load, "SUPPLIES", tmp_path)

    assert on_battery() is expected


def test_processes_of_others_on_a_made_up_gpu_count_only_where_those_of_the_run_are_listed():
    card = dict.fromkeys(("memory", "free", "utilisation", "power", "temperature", "throttled"))
    listed = [{"pid": 7, "memory": None}, {"pid": 8, "memory": None}]

    assert sampler._device(card | {"processes": listed}, {7})["others"] == 1
    assert sampler._device(card | {"processes": listed}, {9})["others"] is None
    assert sampler._device(card | {"processes": None}, {9})["others"] is None


@pytest.fixture
def machine(folder, write_metrics):
    """`machine(fields of each sample, …, runs={id: (first, last second)}, card={…})`: a reader of 40 steps on a host of
    4 cores."""

    def make(*samples, runs=None, card=None):
        write_metrics(0, {"k": "meta", "t": 0.0, "host": "h", "time": 1000.0})
        for i in range(1, 41):
            write_metrics(0, {"k": "step", "t": i / 10, "step": i, "n": 1, "seconds": [0.1] * 3})
        folder.hosts.mkdir()
        devices = [{"name": "T4"}] if card else []
        lines = [{"k": "meta", "t": 0.0, "time": 1000.0, "host": "h", "usable_cores": 4, "devices": devices}]
        for i, fields in enumerate(samples):
            lines.append({"k": "host", "t": float(i), "cpu": 50.0, "devices": [card] if card else []} | fields)
        for run, times in (runs or {}).items():
            lines += [{"k": "runs", "t": t, "runs": [run]} for t in times]
        folder.host("h").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return RunReader(folder).read_all()

    return make


def stated(reader, state=ENDED):
    return [each.sentence for each in disturbances(reader, state)]


def test_other_programs_that_used_many_of_the_cores(machine):
    reader = machine(*[{"busy": 4.0, "own": 0.6}] * 60, *[{"busy": 0.6, "own": 0.6}] * 20)

    assert stated(reader) == ["other programs used 64% of these cores"]
    assert verdict(reader, ENDED)[0] == "other programs used 64% of these cores"
    assert stated(reader, RUNNING) == ["other programs use 57% of these cores"]


@pytest.mark.parametrize(
    "sample",
    [
        {"busy": 3.0, "own": 0.6},  # a core was idle
        {"busy": 3.9, "own": 3.1},
        {"busy": None, "own": None},
        {},
    ],
)
def test_other_programs_that_left_enough_or_cannot_be_told_are_not_stated(machine, sample):
    assert stated(machine(*[sample] * 60)) == []


def test_runs_that_overlapped_for_long_are_named(machine):
    reader = machine(runs={"a": (10.0, 20.0), "20260102T030405Z-b-0a1b": (30.0, 50.0), "c": (55.0, 56.0)})
    (sentence,) = stated(reader)

    assert sentence.startswith("it overlapped with run b-0a1b from ")
    assert sentence.endswith(", and with 1 more, on the same cores")
    assert reader.hosts["h"].runs["20260102T030405Z-b-0a1b"] == (1030.0, 1050.0)


@pytest.mark.parametrize("wall", [1e17, -1e17, 1e300])
def test_a_damaged_clock_names_no_run(machine, wall):
    reader = machine(runs={"b": (30.0, 50.0)})
    lines = [{"k": "meta", "t": 0.0, "time": wall}, *({"k": "runs", "t": t, "runs": ["c"]} for t in (1.0, 1001.0))]
    reader.folder.host("h").write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert stated(RunReader(reader.folder).read_all()) == []


def test_of_many_hosts_the_first_are_named(machine):
    reader = machine(*[{"busy": 4.0, "own": 1.0}] * 10)
    for i in range(9):
        (reader.folder.hosts / f"node{i}.jsonl").write_bytes(reader.folder.host("h").read_bytes())
    reader.folder.host("h").unlink()

    sentences = stated(RunReader(reader.folder).read_all())
    assert sentences == [f"other programs used 75% of these cores on node{i}" for i in range(4)]


def test_a_battery_and_heat(machine):
    reader = machine(*[{"on_battery": True, "throttled": 0.5}] * 10)

    assert stated(reader) == ["heat slowed the processor down for 50% of the time", "the machine ran on its battery"]


def test_what_a_made_up_driver_says_of_a_gpu(machine):
    card = {"utilisation": 99, "throttled": True, "others": 2}

    assert stated(machine(*[{}] * 4, card=card)) == [
        "other processes had memory on GPU 0 T4 for 100% of the time",
        "heat slowed GPU 0 T4 down for 100% of the time",
    ]


def test_a_ratio_of_times_is_marked_where_it_may_say_nothing(tmp_path):
    """The first run was alone, the second is a repeat of it, another program disturbed the third."""
    runs = []
    for name, script, own in (("alone", "a", 4.0), ("again", "a", 4.0), ("disturbed", "b", 1.0)):
        run = RunFolder.create(tmp_path, name)
        manifest = {"format": 1, "world_size": 1, "script": {"sha256": script}}
        run.manifest.write_text(json.dumps(manifest))
        ENDED.write(run)
        run.rank(0).mkdir(parents=True)
        step = {"k": "step", "t": 1.0, "step": 1, "n": 1, "seconds": [0.1] * 3, "samples": 8}
        run.metrics(0).write_text(json.dumps(step) + "\n")
        run.hosts.mkdir()
        lines = [
            {"k": "meta", "t": 0.0, "host": "h", "usable_cores": 4},
            {"k": "host", "t": 1.0, "busy": 4, "own": own},
        ]
        run.host("h").write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs.append(run.path)
    comparison = compare(runs)

    assert [row["speed-up"] for row in comparison._rows()] == ["1.00x", "1.00x (repeat)", "1.00x (other load)"]
    assert re.search(r"\ndisturbed-\w+: other programs used 75% of these cores\n", str(comparison))
    assert "\nrepeat: the same script" in str(comparison)
    assert list(comparison.table["speedup"]) == [1.0, 1.0, 1.0]
    assert list(comparison.table["speedup_remark"]) == ["", "repeat", "other load"]
    assert [row["speed-up"] for row in compare(runs[::2][::-1])._rows()] == ["1.00x", "1.00x (other load)"]


def test_what_a_fold_keeps_of_a_machine_states_the_same(machine):
    reader = machine(*[{"busy": 4.0, "own": 0.6, "on_battery": True}] * 80, runs={"b": (30.0, 50.0)})
    stated_before = stated(reader), stated(reader, RUNNING)

    reader.hosts["h"] = HostHistory.of("h", json.loads(json.dumps(reader.hosts["h"].as_dict())))

    assert (stated(reader), stated(reader, RUNNING)) == stated_before
