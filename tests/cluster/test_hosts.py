"""Several hosts by ssh: what every user meets on the way to two machines, on two network namespaces.

Times are safety limits; docs/how_to/cluster.md has those that were measured.
"""

from __future__ import annotations

import json
import re
import sys
import time

import psutil
import pytest
from cluster.namespaces import ADDRESSES, CLONED, LOOPBACK, RIGHT, TwoHosts, needs_hosts
from conftest import SCRIPTS, marked_processes
from faults.scene import last_step, read, wait_until

import labkit
from labkit.record import RunFolder, State
from labkit.stored_runs import list_runs

pytestmark = needs_hosts
FAULTY = str(SCRIPTS / "faulty.py")
SHARED_MACHINE = 2
ENDLESS = 100_000
TIME_LIMIT = 8  # seconds: of the process group


@pytest.fixture
def hosts(request, tmp_path):
    """Two hosts, with right names unless the test asks for others."""
    two = TwoHosts(tmp_path / "hosts", **getattr(request, "param", {}))
    try:
        yield two
        left = two.processes("A") + two.processes("B")
    finally:
        two.close()
    assert not left, left


def launched(hosts: TwoHosts, *, names: str = "hA,hB", ranks: int = 1, detach: bool = True, **options) -> RunFolder:
    """A run of `faulty.py` that `labkit launch --hosts` has started from host A."""
    values = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words = ["launch", FAULTY, "--hosts", names, "--nproc-per-node", str(ranks), *(["--detach"] if detach else [])]
    code, said = hosts.labkit(*words, "--", *values)
    assert code == 0, said
    return list_runs()[-1]


def ends(hosts: TwoHosts, folder: RunFolder, within: float) -> dict | None:
    """The cause that both hosts' folders end with, which must be one and the same."""
    began = time.monotonic()
    wait_until(lambda: State.read(folder).is_final, within * SHARED_MACHINE, lambda: str(State.read(folder)))
    states = [read(folder.node(node).state) for node in (0, 1)]
    cause = states[0]["cause"] or {}
    since = states[0]["ended"] - cause["time_ns"] / 1e9 if "time_ns" in cause else time.monotonic() - began
    print(f"\n{since:.1f} s after the fault: {State.read(folder)}")
    assert states[0]["cause"] == states[1]["cause"]
    assert states[0]["state"] == states[1]["state"] == State.read(folder).state
    assert not marked_processes(folder.path)
    wait_until(lambda: not hosts.processes("A") + hosts.processes("B"), 5, "processes left")
    return states[0]["cause"]


def wait_for_step(folder: RunFolder, step: int = 3) -> None:
    wait_until(lambda: min(last_step(folder, rank) for rank in (0, 1)) >= step, 120, lambda: State.read(folder))


@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param({"names": RIGHT}, marks=pytest.mark.soak),
        pytest.param({"names": LOOPBACK}, marks=pytest.mark.soak),
        {"names": CLONED, "called": ("vm", "vm")},
    ],
    indirect=True,
    ids=["right names", "own name on 127.0.1.1", "both called vm"],
)
def test_two_hosts_train_whatever_their_hosts_files_say(hosts):
    folder = launched(hosts, ranks=2, steps=10)
    assert ends(hosts, folder, 30) is None
    assert State.read(folder).state == "succeeded"
    assert sorted(path.stem for path in folder.hosts.glob("*.jsonl")) == ["hA", "hB"]
    said = {record["host"] for rank in range(4) for record in records(folder, rank) if record["k"] == "meta"}
    assert said == {"hA", "hB"}


@pytest.mark.soak
def test_the_first_host_may_be_another_than_the_one_that_launches(hosts):
    folder = launched(hosts, names="root@hB,localhost", steps=5)
    assert ends(hosts, folder, 30) is None
    assert f"--master-addr {ADDRESSES['B']} " in folder.command.read_text()
    assert sorted(path.stem for path in folder.hosts.glob("*.jsonl")) == ["hB", "localhost"]


def records(folder: RunFolder, rank: int) -> list[dict]:
    return [json.loads(line) for line in folder.metrics(rank).read_text().splitlines()]


def test_a_cut_cable_ends_the_run_on_both_hosts_and_names_them(hosts):
    folder = launched(hosts, steps=ENDLESS, timeout=TIME_LIMIT)
    wait_for_step(folder)
    cut = time.strftime("%H:%M:%S")
    hosts.link("down")
    cause = ends(hosts, folder, TIME_LIMIT + 10)
    assert cause["kind"] == "parted"
    assert cause["sentence"].startswith("hosts hA and hB lost contact at ")
    assert abs(clock(cause["sentence"]) - clock(cut)) <= 3


def clock(text: str) -> int:
    """Seconds since midnight of the first time in a text."""
    hours, minutes, seconds = map(int, re.search(r"(\d+):(\d+):(\d+)", text).groups())
    return hours * 3600 + minutes * 60 + seconds


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [5, 30])
def test_a_cable_that_is_back_before_the_time_limit_is_not_noticed(hosts, seconds):
    folder = launched(hosts, steps=ENDLESS, timeout=90)
    wait_for_step(folder)
    hosts.link("down")
    time.sleep(seconds)
    before = last_step(folder, 0)
    hosts.link("up")
    wait_until(lambda: min(last_step(folder, rank) for rank in (0, 1)) > before + 3, 60, lambda: State.read(folder))
    assert State.read(folder).state == "running"
    labkit.attach(folder.path).stop()
    assert ends(hosts, folder, 8)["sentence"] == "stopped on request"


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_rank_that_fails_on_either_host_is_the_cause_on_both(hosts, rank):
    folder = launched(hosts, fault="raise", rank=rank)
    assert ends(hosts, folder, 10 + 20)["sentence"].startswith(f"rank {rank} on h{'AB'[rank]} failed: ValueError: boom")


def test_a_killed_agent_is_the_cause_on_both(hosts):
    folder = launched(hosts, steps=ENDLESS)
    wait_for_step(folder)
    psutil.Process(read(folder.node(1).agent)["agent"]["pid"]).kill()
    assert ends(hosts, folder, 10)["sentence"].startswith("torchrun on hB was killed (SIGKILL)")


@pytest.mark.parametrize("host", ["A", pytest.param("B", marks=pytest.mark.soak)])
def test_a_host_that_dies_is_the_cause_on_the_other(hosts, host):
    folder = launched(hosts, steps=ENDLESS)
    wait_for_step(folder)
    hosts.kill_everything_on(host)
    assert ends(hosts, folder, 10)["sentence"].startswith(f"host h{host} was lost at ")


@pytest.mark.soak
def test_a_host_that_loses_its_power_is_missed_before_its_connections_are(hosts):
    folder = launched(hosts, steps=ENDLESS, timeout=90)
    wait_for_step(folder)
    hosts.link("down")  # nothing that its kernel might still say arrives
    hosts.kill_everything_on("B")
    assert ends(hosts, folder, 30)["sentence"].startswith("host hB was lost at ")


@pytest.mark.soak
def test_a_rank_that_hangs_on_another_host_is_asked_where_it_is(hosts):
    folder = launched(hosts, fault="hang", timeout=90)
    notice = wait_until(lambda: State.read(folder).notice, 40, lambda: State.read(folder))
    assert "rank 1 has not entered" in notice
    assert "time.sleep(600)" in notice
    code, said = hosts.labkit("stacks", str(folder.path))
    assert code == 0
    assert "== rank 1, step " in said
    assert "unknown ==" in said  # the process of another machine
    labkit.attach(folder.path).stop()
    assert ends(hosts, folder, 8)["sentence"] == "stopped on request"


@pytest.mark.soak  # a minute
def test_lines_are_printed_to_paste_and_a_host_that_never_comes_is_named(hosts):
    code, said = hosts.labkit("launch", FAULTY, "--hosts", "hA,hB", "--nproc-per-node", "1", "--print")
    assert code == 0, said
    lines = [line for line in said.splitlines() if line.startswith("cd ")]
    folder = list_runs()[-1]
    assert f"--master-addr {RIGHT['A'].split()[0]}" in lines[1]
    assert State.read(folder).notice == "none of its 2 nodes has started yet"
    alone = hosts.start("A", ["sh", "-c", lines[0]], log="pasted.log")
    sentence = ends(hosts, folder, 65)["sentence"]
    assert sentence == "node 1 (hB) of 2 did not connect within 60 s"
    assert alone.wait(5) == 1


def pasted(hosts, change=lambda line: line):
    """The processes of the lines that were printed, each on its host, and the run's folder."""
    code, said = hosts.labkit(
        "launch", FAULTY, "--hosts", "hA,hB", "--nproc-per-node", "1", "--print", "--", "--steps", "5"
    )
    assert code == 0, said
    lines = [change(line) for line in said.splitlines() if line.startswith("cd ")]
    return [hosts.start(h, ["sh", "-c", line], log="pasted.log") for h, line in zip("AB", lines, strict=True)]


@pytest.mark.parametrize("hosts", [{"names": LOOPBACK}], indirect=True)
def test_pasted_lines_train_also_by_a_name_that_is_the_loopback_on_its_own_host(hosts):
    processes = pasted(hosts, lambda line: line.replace("--master-addr 10.231.77.1", "--master-addr hA"))
    assert ends(hosts, list_runs()[-1], 30) is None
    assert [process.wait(5) for process in processes] == [0, 0]


@pytest.mark.parametrize("hosts", [{"names": {"A": "10.231.77.2 hB\n", "B": "127.0.1.1 hX\n"}}], indirect=True)
def test_a_name_that_leads_back_to_the_other_host_is_the_cause_on_both(hosts):
    processes = pasted(hosts, lambda line: line.replace("--master-addr 10.231.77.1", "--master-addr localhost"))
    cause = ends(hosts, list_runs()[-1], 30)
    assert cause["sentence"].startswith("hB: the first host, localhost, resolves to 127.0.0.1 here")
    assert [process.wait(5) for process in processes] == [1, 1]


@pytest.mark.soak
def test_a_run_that_is_tied_ends_with_the_terminal_that_started_it(hosts):
    words = ["launch", FAULTY, "--hosts", "hA,hB", "--nproc-per-node", "1", "--", "--steps", str(ENDLESS)]
    terminal = hosts.start("A", [sys.executable, "-m", "labkit.cli", *words], log="terminal.log")
    folder = wait_until(list_runs, 60, "no run")[-1]
    wait_for_step(folder)
    terminal.kill()
    terminal.wait()
    assert ends(hosts, folder, 15)["sentence"] == "stopped on request"


def refused(hosts: TwoHosts, *words: str) -> str:
    code, said = hosts.labkit("launch", FAULTY, "--nproc-per-node", "1", *words)
    assert code == 2, said
    assert not list_runs()
    return said


def test_what_is_amiss_is_said_before_anything_starts(hosts):
    assert "ssh hC failed:" in refused(hosts, "--hosts", "hA,hC")
    assert "--print` prints the lines to paste" in refused(hosts, "--hosts", "hA,hC")
    assert "is not a host name" in refused(hosts, "--hosts", "hA,-oProxyCommand=true")
    (hosts.folder / "key.pub").write_text("")
    said = refused(hosts, "--hosts", "hA,hB")
    assert "ssh hB failed: " in said
    assert "Permission denied" in said


@pytest.mark.parametrize("hosts", [{"names": {"A": "127.0.1.1 hA\n127.0.1.1 hB\n", "B": ""}}], indirect=True)
def test_another_hosts_name_on_the_loopback_is_reported(hosts):
    assert "hB resolves to 127.0.1.1 here, which is this machine, " in refused(hosts, "--hosts", "hA,hB")
