"""Two node supervisors on this machine, through 127.0.0.1: real torchrun, static rendezvous, gloo between them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest
from conftest import SCRIPTS, marked_processes
from faults.scene import last_step, read, wait_until

import labkit
from labkit.launch_options import LaunchOptions
from labkit.launcher.prepare import create_run, prepare_launch
from labkit.launcher.stopping import stop
from labkit.launcher.torchrun_command import node_command
from labkit.record import Nodes, RunFolder, RunReader, State

FAULTY = SCRIPTS / "faulty.py"
SHARED_MACHINE = 2
ENDLESS = 100_000


class Pair:
    """A run of `faulty.py`, or another script, on two nodes with one rank each; node 1 may be left out."""

    def __init__(self, begin=(0, 1), nproc_per_node=1, script=FAULTY, args=(), **parameters):
        nodes = Nodes(2, nproc_per_node, ("localhost", "localhost"))
        self.port = free_port()
        options = LaunchOptions(args=args)
        self.folder = create_run(
            prepare_launch(script, options, parameters, nodes=nodes), address="127.0.0.1", port=self.port
        )
        self.processes = {}
        for node in begin:
            self.begin(node)

    def begin(self, node: int) -> None:
        with (self.folder.path / f"node{node}.log").open("wb") as log:
            command = node_command(self.folder, node, "127.0.0.1", self.port)
            self.processes[node] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def node(self, node: int) -> RunFolder:
        return self.folder.node(node)

    def agent(self, node: int) -> psutil.Process:
        return psutil.Process(wait_until(lambda: read(self.node(node).agent).get("agent"))["pid"])

    def wait_for_step(self, step: int = 3) -> None:
        wait_until(lambda: min(last_step(self.folder, rank) for rank in (0, 1)) >= step, 120, self.said)

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.path.glob("node*.log")))

    def ends(self, within: float) -> dict:
        """The cause that both nodes give, which must be the same, after at most `within` seconds."""
        began = time.monotonic()
        wait_until(lambda: State.read(self.folder).is_final, within * SHARED_MACHINE, lambda: State.read(self.folder))
        print(f"over after {time.monotonic() - began:.1f} s: {State.read(self.folder)}")
        for process in self.processes.values():
            process.wait(5)
        states = [read(self.node(node).state) for node in (0, 1)]
        assert states[0]["cause"] == states[1]["cause"]
        assert states[0]["state"] == states[1]["state"] == State.read(self.folder).state
        assert not marked_processes(self.folder.path)
        return states[0]["cause"]

    def close(self) -> None:
        labkit.attach(self.folder.path).stop(grace=0)
        for process in self.processes.values():
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextmanager
def pair(**options):
    two = Pair(**options)
    try:
        yield two
    finally:
        two.close()


def test_two_nodes_train_together_and_say_so():
    with pair(nproc_per_node=2, steps=10) as two:
        assert two.ends(60) is None
        assert {p.returncode for p in two.processes.values()} == {0}
        reader = RunReader(two.folder).read_all()
        assert sorted(reader.ranks) == [0, 1, 2, 3]
        assert sorted(reader.hosts) == ["localhost-0", "localhost-1"]
        run = labkit.attach(two.folder.path)
        assert run.status().state == "succeeded"
        assert run.wait().state == "succeeded"
        assert "4 on 2 nodes" in str(labkit.compare(run))
        assert [line.split("--node-rank ")[1][0] for line in run.command.splitlines()] == ["0", "1"]
        assert "4" in repr(run)


def test_the_first_node_judges_the_ranks_of_all():
    with pair(script=SCRIPTS.parent / "witness/faulty/hang_zero_loss.py") as two:
        cause = two.ends(90)
        run = labkit.attach(two.folder.path)
        assert (cause["kind"], cause["rank"], cause["step"]) == ("slip", 1, 12)
        assert [(found.since, found.ranks) for found in run.findings()] == [(12, (1,))]
        assert cause["sentence"].startswith("in step 12 rank 1 left out one collective")
        assert run.status().notice is None  # it is not told twice


def test_a_second_live_run_on_one_checkpoint_folder_ends_with_the_name_of_the_first(tmp_path):
    script, saved = tmp_path / "train.py", tmp_path / "saved"
    script.write_text(
        "import argparse\nimport time\n\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--checkpoint-dir')\nparser.parse_args()\ntime.sleep(600)\n"
    )
    with pair(script=script, checkpoint_dir=saved) as first:
        wait_until(lambda: len(first.folder.started_ranks()) == 2)
        with pair(script=script, checkpoint_dir=saved) as second:
            sentence = second.ends(20)["sentence"]
            assert f": run {first.folder.id} on " in sentence
            assert f"is still running and saves its checkpoints to {saved}" in sentence
        assert not State.read(first.folder).is_final


@pytest.mark.soak  # as on two hosts
def test_the_cause_is_that_of_the_rank_that_failed_on_both_nodes():
    with pair(fault="raise") as two:
        two.wait_for_step(3)
        cause = two.ends(10)
        assert cause["sentence"].startswith("rank 1 on localhost-1 failed: ValueError: boom")
        assert cause["rank"] == 1
        assert {p.returncode for p in two.processes.values()} == {1}


@pytest.mark.soak  # as on two hosts
def test_a_killed_agent_is_named_on_both_nodes():
    with pair(steps=ENDLESS) as two:
        two.wait_for_step()
        two.agent(1).kill()
        assert two.ends(10)["sentence"] == "torchrun on localhost-1 was killed (SIGKILL), and its ranks with it"


def test_ranks_that_do_not_notice_the_end_of_the_others_are_ended_with_them(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('boom')\ntime.sleep(600)\n")
    with pair(script=script) as two:
        cause = two.ends(20)
        assert cause["sentence"] == "rank 1 on localhost-1 failed: ValueError: boom (alone.py line 3)"


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_node_that_is_gone_with_all_of_its_processes_is_named_by_the_other(node):
    with pair(steps=ENDLESS) as two:
        two.wait_for_step()
        agent = two.agent(node)
        for process in [two.processes[node], agent, *agent.children(recursive=True)]:
            process.kill()
        two.processes[node].wait()
        assert two.ends(10)["sentence"].startswith(f"host localhost-{node} was lost at ")


@pytest.mark.soak  # a minute
def test_a_node_that_never_comes_is_named():
    with pair(begin=[0]) as two:
        assert two.ends(65)["sentence"] == "node 1 (localhost-1) of 2 did not connect within 60 s"
        two.begin(1)  # too late
        assert two.processes[1].wait(30) == 2
        assert "the run had ended before node 1 started" in two.said()


def test_a_node_that_is_done_waits_for_one_that_takes_longer():
    """An export by rank 0, for one, which no other rank waits for; a host that goes on is not a host that is lost."""
    impatient = "import sys; from labkit.launcher import node; node.AGREE_SECONDS = 0.1; sys.exit(node.main())"
    with pair(begin=[]) as two:
        for node, seconds in ((0, "0"), (1, "4")):
            command = [sys.executable, "-c", impatient, str(two.folder.path), str(node), "--", "sleep", seconds]
            two.processes[node] = subprocess.Popen(command, start_new_session=True)
        assert two.ends(30) is None
        assert State.read(two.folder).state == "succeeded"


def test_a_stop_from_outside_ends_all_nodes():
    with pair(steps=ENDLESS) as two:
        two.wait_for_step()
        state = labkit.attach(two.folder.path).stop()
        assert state.state == "stopped"
        assert two.ends(8)["sentence"] == "stopped on request"
        assert {p.returncode for p in two.processes.values()} == {143}


@pytest.mark.parametrize("interrupts", [True, False])
def test_every_node_gives_its_ranks_time_to_save(interrupts, tmp_path, capfd):
    """Also ranks that hear of an interrupt only when the other node's have saved."""
    roles = ["pauses", "saves"] if interrupts else ["handles", "handles"]
    with pair(script=SCRIPTS / "signalled.py", args=[tmp_path, *roles, "--seconds", 8]) as two:
        wait_until(lambda: len([*tmp_path.glob("trains-*")]) == 2, 120, two.said)
        time.sleep(1)
        state = stop(two.folder, interrupts=interrupts, say=print)
        assert (state.state, state.killed) == ("stopped", 0)
        two.ends(8)
    assert len([*tmp_path.glob("saved-*" if interrupts else "handled-*")]) == 2
    assert "stopping: waiting for rank " in capfd.readouterr().out


def test_what_a_rank_leaves_running_on_one_node_holds_up_nobody(tmp_path):
    train = tmp_path / "train.py"
    train.write_text(
        "import os, subprocess, sys\nif os.environ['RANK'] == '1':\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    )
    with pair(script=train) as two:
        run = labkit.Run(two.folder)
        assert run.wait(60 * SHARED_MACHINE).state == "succeeded"
        assert re.match(r"`python -c …` \(pid \d+ on localhost-1\) was still running", run.status().notice)
        final = [read(two.node(node).state) for node in (0, 1)]
        assert two.processes[0].wait(5) == 0
        assert two.processes[1].poll() is None
        assert not run.is_over
        assert run.stop().killed == 1
        assert two.ends(8) is None
        assert run.is_over
        assert [read(two.node(node).state) for node in (0, 1)] == final
        assert len(read(two.node(1).left_running)["killed"]) == 1


def test_what_a_rank_left_running_ends_with_a_run_that_fails_elsewhere(tmp_path):
    train = tmp_path / "train.py"
    train.write_text(
        "import os, subprocess, sys, time\nif os.environ['RANK'] == '0':\n    time.sleep(3)\n    sys.exit(3)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    )
    with pair(script=train) as two:
        assert "exited with 3" in two.ends(30)["sentence"]


def test_a_supervisor_that_is_signalled_stops_the_run():
    with pair(steps=ENDLESS) as two:
        two.wait_for_step()
        two.processes[1].send_signal(signal.SIGTERM)
        assert two.ends(15)["sentence"] == "the supervisor on localhost-1 received SIGTERM"


def test_a_rank_that_does_not_answer_is_named_and_not_the_network():
    with pair(fault="hang", timeout=4) as two:
        two.wait_for_step()
        assert two.ends(30)["sentence"].startswith("rank 1 on localhost-1 had been ")


def test_a_node_begins_once_and_sees_the_folder(tmp_path):
    with pair(steps=ENDLESS) as two:
        two.wait_for_step()
        command = node_command(two.folder, 1, "127.0.0.1", two.port)
        again = subprocess.run(command, capture_output=True, text=True)
        assert again.returncode == 2
        assert "node 1 of this run was already started" in again.stderr
        command[command.index(str(two.folder.path))] = str(tmp_path / "elsewhere")
        elsewhere = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LABKIT_HOST": "hB"})
        assert elsewhere.stderr.startswith("labkit: host hB cannot see ")
