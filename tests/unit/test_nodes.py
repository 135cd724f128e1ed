import errno
import json
import os
import re
import socket
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

import labkit
from labkit import run as run_module
from labkit.cluster import hosts, ssh
from labkit.cluster.hosts import _ranks
from labkit.errors import LaunchError
from labkit.files import is_deleted, write_json
from labkit.hardware import machine as hardware
from labkit.hardware.machine import Gpu, GpusUnknownError, Hardware
from labkit.hardware.network import interface_of, own_address_towards, resolved
from labkit.host import HOST, Identity, host_name
from labkit.launch_options import LaunchOptions
from labkit.launcher import locks, node, peers
from labkit.launcher.causes import stacks
from labkit.launcher.causes.explain import conclusion
from labkit.launcher.node import check_port, main
from labkit.launcher.peers import Peer
from labkit.launcher.prepare import create_run, prepare_launch
from labkit.launcher.stalls import Progress
from labkit.launcher.supervisor import Supervisor
from labkit.launcher.torchrun_command import guest_node_command, node_command, rank_environment
from labkit.record import Cause, Nodes, ScriptFacts, State
from labkit.record.nodes import Node
from labkit.record.state import merged
from labkit.sweeps.sweeper import Room

ROOT = State("starting", 100.0)
RUNNING = State("running", 101.0, notice="rank 1 has made no progress")
STARTING = State("starting", 101.0)
GOOD = State("succeeded", 101.0, 110.0, 0)
BAD = State("failed", 101.0, 112.0, 1, Cause("exception", "rank 3 on hB failed"), killed=1)
STOPPED = State("stopped", 101.0, 111.0, -15, Cause("stopped", "stopped on request"), killed=2)
ELSEWHERE = {"pid": 1, "started": 2.0, "boot": "another", "host": "another-host"}


@pytest.mark.parametrize(
    ("states", "heard", "expected"),
    [
        ([None, None], [False, False], "starting"),
        ([STARTING, None], [True, False], "starting"),
        ([RUNNING, STARTING], [True, True], "running"),
        ([RUNNING, RUNNING], [True, True], "running"),
        ([GOOD, RUNNING], [False, True], "running"),
        ([RUNNING, RUNNING], [False, True], "running"),
        ([RUNNING, RUNNING], [False, False], "lost"),
        ([GOOD, GOOD], [False, False], "succeeded"),
        ([GOOD, RUNNING], [False, False], "lost"),
        ([GOOD, None], [False, False], "lost"),
        ([BAD, BAD], [False, False], "failed"),
        ([BAD, RUNNING], [False, False], "failed"),
        ([GOOD, BAD], [False, False], "failed"),
        ([STOPPED, STOPPED], [True, True], "stopped"),
        ([STOPPED, BAD], [False, False], "failed"),
    ],
)
def test_the_state_of_a_run_is_made_of_its_nodes(states, heard, expected):
    state = merged(ROOT, states, heard)

    assert state.state == expected
    assert state.started == ROOT.started
    assert (state.cause is None) == (expected not in ("failed", "stopped", "lost"))


def test_merged_states_keep_what_each_node_knows():
    assert merged(ROOT, [STARTING, RUNNING], [True, True]).notice == "rank 1 has made no progress"
    both = merged(ROOT, [GOOD, BAD], [False, False])
    assert (both.ended, both.exit_code, both.killed) == (112.0, 1, 1)
    assert both.cause == BAD.cause
    stopping, later = (State("running", 101.0, stops_by=by) for by in (120.0, 130.0))
    assert merged(ROOT, [stopping, later, RUNNING], [True] * 3).stops_by == 130.0
    ended = [replace(GOOD, notice=notice) for notice in ("a", None, "b", "a", "c", "d", "e")]
    assert merged(ROOT, ended, [False] * 7).notice == "a; b; c; and 2 more"


def test_a_run_is_stuck_when_all_of_its_nodes_are():
    stuck, later = (State("running", 101.0, stuck_since=since) for since in (120.0, 130.0))
    assert merged(ROOT, [stuck, later], [True, True]).stuck_since == 130.0
    assert merged(ROOT, [stuck, RUNNING], [True, True]).stuck_since is None
    assert merged(ROOT, [RUNNING, stuck], [True, True]).stuck_since is None


def test_nodes_are_read_back_and_damage_is_no_node():
    nodes = Nodes(2, 3, ("hA", "hB"))

    assert Nodes.decode(json.loads(json.dumps(nodes.as_dict()))) == nodes
    assert Nodes.decode(Nodes(2, 3).as_dict()) == Nodes(2, 3)
    assert (nodes.world_size, nodes.of_rank(2), nodes.of_rank(3), list(nodes.ranks_of(1))) == (6, 0, 1, [3, 4, 5])
    for damage in (None, [], "2", {}, {"count": 0, "nproc_per_node": 1}, {"count": True, "nproc_per_node": 1}):
        assert Nodes.decode(damage) is None
    assert Nodes.decode({"count": 2, "nproc_per_node": 1, "hosts": ["hA"]}) == Nodes(2, 1)


def test_two_nodes_on_one_host_have_different_names():
    nodes = Nodes(3, 1, ("hA", "hB", "hA"))

    assert [nodes.name(node) for node in range(3)] == ["hA-0", "hB", "hA-1"]
    assert [nodes.sharing(node) for node in range(3)] == [2, 1, 2]
    assert (Nodes(2, 1).name(0), Nodes(2, 1).sharing(0)) == (None, 1)


@pytest.fixture
def run(folder):
    folder.nodes.mkdir()
    folder.script.write_text("pass\n")
    nodes = Nodes(2, 1, ("hA", "hB"))
    write_json(folder.manifest, {"format": 1, "id": folder.id, "world_size": 2, "nodes": nodes.as_dict()})
    ROOT.write(folder)
    return folder


def begun(run, node, identity=None, *, said=None):
    home = run.node(node)
    home.path.mkdir(exist_ok=True)
    write_json(home.agent, {"supervisor": identity or Identity.of(os.getpid()).as_dict()})
    Node(home).beat(f"h{'AB'[node]}")
    if said is not None:
        home.node_heartbeat.write_text(json.dumps({"time": said, "host": f"h{'AB'[node]}"}))
    return home


def test_a_run_waits_until_its_nodes_have_started(run):
    assert State.read(run).state == "starting"
    assert State.read(run).notice == "none of its 2 nodes has started yet"


def test_a_node_is_alive_by_its_process_here_and_by_its_heartbeat_elsewhere(run):
    assert Node(begun(run, 0)).is_heard()
    assert not Node(begun(run, 0, Identity.of(os.getpid()).as_dict() | {"started": 1.0})).is_heard()
    assert Node(begun(run, 1, ELSEWHERE)).is_heard()
    assert Node.heard(run) == ["hB"]
    assert not Node(begun(run, 1, ELSEWHERE, said=time.time() - 100)).is_heard()
    assert Node(run.node(1)).last_beat().host == "hB"


def test_a_final_state_of_the_run_itself_wins(run):
    RUNNING.write(begun(run, 0))
    assert State.read(run).state == "running"
    STOPPED.write(run)
    assert State.read(run) == STOPPED


def test_ranks_of_a_job_may_wait_on_made_up_gpus_that_its_submitter_did_not_know(run, monkeypatch):
    monkeypatch.setattr(hardware, "DRIVER_FILES", (run.script,))
    supervisor = SimpleNamespace(manifest=run.read_manifest())
    assert Supervisor.may_wait_on_gpus(supervisor)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not Supervisor.may_wait_on_gpus(supervisor)


def counted(monkeypatch, module, name):
    calls, called = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: (calls.append(given), called(*given))[1])
    return calls


def test_what_a_node_has_said_once_is_read_once(run, monkeypatch):
    peer = Peer(begun(run, 1))
    identities, outcomes = counted(monkeypatch, Node, "supervisor"), counted(monkeypatch, peers, "read_json")
    assert all(peer.is_fine() for _ in range(5))
    assert len(identities) == 1
    outcomes.clear()
    ended(run, 1, exit_code=0)
    assert all(peer.is_fine() and peer.has_ended() for _ in range(5))
    assert len(outcomes) == 1


def test_the_state_of_many_nodes_is_read_less_often(run, monkeypatch):
    RUNNING.write(begun(run, 0))
    looks = counted(monkeypatch, run_module, "state_of_run")
    with pytest.raises(TimeoutError):
        labkit.attach(run.path).wait(timeout=1.5)
    assert len(looks) < 10


def ended(run, node, **fields):
    home = begun(run, node)
    write_json(home.outcome, {"exit_code": 1, "killed": 0, "why": None, "decided": 50.0, "ended": 50.0} | fields)


def said(run, rank, message, *, at=40.0, trace=()):
    run.rank(rank).mkdir(exist_ok=True)
    fields = {"rank": rank, "kind": "exception", "exception": "RuntimeError", "message": message, "step": 3}
    write_json(run.error(rank), fields | {"time_ns": int(at * 1e9), "traceback": list(trace)})


@pytest.fixture
def seen(write_metrics):
    for rank in (0, 1):
        write_metrics(rank, {"k": "meta", "v": 1, "t": 0.0, "time": 100.0, "rank": rank})


def test_every_node_that_succeeded_makes_a_success(run):
    ended(run, 0, exit_code=0)
    ended(run, 1, exit_code=0)
    assert conclusion(run, run) == ("succeeded", None)


def test_the_rank_that_failed_by_itself_is_the_cause_whichever_host_noticed_first(run, seen):
    ended(run, 0, exit_code=1, ended=41.0)
    ended(run, 1, exit_code=1, ended=42.0)
    said(run, 0, "Connection closed by peer [10.0.0.2]:123", at=39.0)
    said(run, 1, "boom", at=40.0)
    name, cause = conclusion(run, run)
    assert (name, cause["sentence"]) == ("failed", "rank 1 on hB failed: RuntimeError: boom")


@pytest.mark.parametrize(("at", "expected"), [(40.0, "failed"), (60.0, "stopped")])
def test_a_stop_counts_unless_a_rank_had_failed_before(run, seen, at, expected):
    stopped = {"kind": "stopped", "sentence": "stopped on request"}
    ended(run, 0, exit_code=-15, why=stopped, decided=50.0)
    ended(run, 1, exit_code=1)
    said(run, 1, "boom", at=at)
    assert conclusion(run, run)[0] == expected


def test_the_exit_code_of_a_node_that_was_ended_with_the_others_explains_nothing(run):
    ended(run, 0, exit_code=-15, why={"kind": "others", "sentence": "another node of the run has ended"})
    ended(run, 1, exit_code=1)
    run.node(1).torchrun_log.write_text("RuntimeError: no such device\n")
    sentence = "torchrun exited with code 1 and no rank recorded why; the last line of its log: RuntimeError: no such"
    assert conclusion(run, run)[1]["sentence"] == f"{sentence} device"


def test_what_a_stop_breaks_is_no_failure(run, seen):
    ended(run, 0, exit_code=-15, why={"kind": "stopped", "sentence": "stopped on request"}, decided=50.0)
    ended(run, 1, exit_code=1)
    said(run, 1, "Connection reset by peer", at=49.0)  # a clock that is behind
    assert conclusion(run, run) == ("stopped", {"kind": "stopped", "sentence": "stopped on request"})


def test_hosts_that_waited_for_each_other_have_lost_each_other(run, seen):
    ended(run, 0)
    ended(run, 1)
    for rank in (0, 1):
        said(run, rank, "Timed out waiting 8000ms for recv operation to complete", at=40.0 + rank)
    name, cause = conclusion(run, run)
    at = time.strftime("%H:%M:%S", time.localtime(32))
    assert name == "failed"
    assert cause["sentence"] == (
        f"hosts hA and hB lost contact at {at}: their ranks waited for each other until the process group's "
        "timeout (8 s)"
    )


def test_a_rank_that_did_not_wait_is_to_blame_and_not_the_network(run, seen):
    ended(run, 0)
    ended(run, 1, exit_code=-15, why={"kind": "others", "sentence": "another node of the run has ended"})
    said(run, 0, "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for recv operation to complete")
    assert conclusion(run, run)[1]["sentence"].startswith("rank 1 on hB stopped answering")


def test_a_node_that_never_said_how_it_ended_is_gone(run, seen):
    ended(run, 0)
    begun(run, 1, ELSEWHERE, said=45.0)
    said(run, 0, "Connection closed by peer")
    at = time.strftime("%H:%M:%S", time.localtime(45))
    assert conclusion(run, run)[1]["sentence"].startswith(f"host hB was lost at {at}: ")


def test_damaged_outcomes_are_explained_all_the_same(run, seen):
    ended(run, 0, exit_code="x", why=[], decided="yesterday")
    begun(run, 1).outcome.write_text("{")
    assert conclusion(run, run)[0] == "failed"


def test_ranks_on_another_host_are_asked_through_the_folder(run, monkeypatch):
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 0.1)
    begun(run, 0)
    begun(run, 1, ELSEWHERE)
    for rank in (0, 1):
        run.rank(rank).mkdir()
        write_json(run.heartbeat(rank), {"pid": 1 << 22, "step": 7, "t": 10.0, "moved": 4.0})

    assert [rank.process for rank in stacks.ask(run, run)] == ["gone", "unknown"]


def test_the_line_of_a_node_is_a_prefix_before_plain_torchrun(runs_dir):
    env = {"OMP_NUM_THREADS": "1", "HF_TOKEN": "secret"}
    launch = prepare_launch("ddp", LaunchOptions(env=env), {"steps": 5}, nodes=Nodes(2, 2, ("hA", "hB")))
    run = create_run(launch, address="10.0.0.1", port=29501)
    command = node_command(run, 1, "10.0.0.1", 29501)

    where = command.index("--")
    assert command[1:where] == ["-m", "labkit.launcher.node", str(run.path), "1"]
    program = ([str(run.script)], ["--steps", "5"])
    assert command[where + 1 :] == guest_node_command(run, Nodes(2, 2), 1, "10.0.0.1", 29501, *program)
    plain = run.command.read_text().splitlines()
    assert plain[1] == (
        "HF_TOKEN=… OMP_NUM_THREADS=1 "
        "torchrun --nnodes 2 --nproc-per-node 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29501 "
        f"--max-restarts 0 -- {run.script} --steps 5"
    )
    assert command[-3:] == [str(run.script), "--steps", "5"]
    assert run.read_manifest().world_size == 4
    assert run.read_manifest().facts == ScriptFacts(("ddp",), False, checkpoints=False, autocasts=False, compiles=False)
    assert "nodes/$SLURM_NODEID/torchrun" in " ".join(node_command(run, "$SLURM_NODEID", "$HEAD", "$PORT"))


def test_a_run_that_cannot_be_made_leaves_no_folder(runs_dir):
    with pytest.raises(LaunchError, match="cannot be split evenly into 3 data ranks"):
        prepare_launch("ddp", LaunchOptions(), {"global_batch_size": 8}, nodes=Nodes(3, 1))
    assert not list(runs_dir.glob("*"))


def test_the_interface_of_this_machine_is_the_loopback():
    assert own_address_towards(resolved("127.0.0.1")) == "127.0.0.1"
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    with pytest.raises(LaunchError, match=r"no network interface on .* has the address 203.0.113.9"):
        interface_of("203.0.113.9")
    with pytest.raises(LaunchError, match="cannot resolve the host 'no.such.host.invalid'"):
        resolved("no.such.host.invalid")


def test_ranks_on_several_nodes_get_the_interface():
    environment, _ = rank_environment({}, interface="eth1")
    assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("eth1", "eth1")
    chosen, _ = rank_environment({"GLOO_SOCKET_IFNAME": "ib0"}, interface="eth1")
    assert chosen["GLOO_SOCKET_IFNAME"] == "ib0"
    alone, _ = rank_environment({})
    assert "NCCL_SOCKET_IFNAME" not in alone


def test_a_port_that_is_in_use_is_reported():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"the rendezvous port {port} is in use on hA"):
            check_port(str(port), "hA")
    check_port(str(port), "hA")
    with pytest.raises(LaunchError, match="must be a port"):
        check_port("eighty", "hA")


def test_a_host_is_called_what_the_launch_calls_it(monkeypatch):
    monkeypatch.delenv(HOST, raising=False)
    assert host_name() == socket.gethostname()
    monkeypatch.setenv(HOST, "hA")
    assert host_name() == "hA"


def test_a_node_that_does_not_see_the_folder_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(HOST, "hB")
    assert main([str(tmp_path / "runs" / "x"), "1", "--", "true"]) == 2
    assert "host hB cannot see " in capsys.readouterr().err


def test_a_job_that_is_requeued_does_not_start_a_run_that_was_stopped(run, capsys):
    STOPPED.write(run)
    assert main([str(run.path), "1", "--attempt", "2", "--", "true"]) == 2
    assert "the run had ended before node 1 started: stopped on request" in capsys.readouterr().err
    assert not run.attempt(2).path.exists()


@pytest.mark.parametrize("hosts", ["hA,hB", [], None, ["-oProxyCommand=x"], ["hA", "h;B"], ["h B"], [3], ["a@-b"]])
def test_what_is_no_name_of_a_host_is_refused(hosts):
    with pytest.raises(LaunchError, match="host"):
        ssh.check_names(hosts)


def test_names_that_ssh_takes_are_taken():
    names = ["hA", "user@node-1.cluster.edu", "10.0.0.1", "fe80::1"]
    assert ssh.check_names(names) == names


def test_this_machine_is_known_by_its_names():
    assert all(ssh.is_this_host(name) for name in ("localhost", "127.0.0.1", socket.gethostname()))
    assert not ssh.is_this_host("no.such.host.invalid")


def test_an_ssh_that_a_busy_jump_host_closed_is_tried_again(tmp_path, monkeypatch):
    fake = tmp_path / "ssh"
    fake.write_text(
        f'#!/bin/sh\n[ -e {tmp_path}/again ] && exec echo \'{{"from": "10.0.0.2"}}\'\ntouch {tmp_path}/again\n'
        "echo kex_exchange_identification: Connection closed by remote host >&2; exit 255\n"
    )
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    assert ssh.ask("no.such.host.invalid", "reach", address="10.0.0.1") == {"from": "10.0.0.2"}


@pytest.mark.parametrize(
    ("code", "errors", "says"),
    [
        (255, "root@hB: Permission denied (publickey).\n", r"ssh hB failed: root@hB: Permission denied .*--print"),
        (127, "env: '/x/python': No such file or directory\n", "hB has no .*same Python at the same path"),
        (1, "/x/python: Error while finding module: No module named labkit\n", "hB has no labkit for"),
        (3, "", "hB could not be queried: it exited with 3"),
    ],
)
def test_what_ssh_says_is_put_into_words(code, errors, says):
    assert re.search(says, ssh._why("hB", code, errors))


def machine(*gpus):
    return Hardware("linux", gpus, 4, 1, 1, None, None)


def test_hosts_that_differ_need_a_number_of_ranks():
    t4 = Gpu("T4", 16, (7, 5))
    with pytest.raises(LaunchError, match=r"\(hA 2, hB 1\); set nproc_per_node"):
        _ranks(["hA", "hB"], [machine(t4, t4), machine(t4)], "auto", None)
    with pytest.raises(LaunchError, match=r"hB: 2 ranks need 2 GPUs"):
        _ranks(["hA", "hB"], [machine(t4, t4), machine(t4)], 2, None)
    with pytest.raises(LaunchError, match="hosts lists hA twice"):
        _ranks(["hA", "hA"], [machine(t4), machine(t4)], 1, None)
    assert _ranks(["hA", "hB"], [machine(t4), machine(t4)], "auto", None) == 1


def test_a_host_says_whether_it_sees_the_folder_of_runs(tmp_path, monkeypatch):
    beacon = tmp_path / "beacon"
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.9 5000 10.0.0.2 22")
    assert not ssh.look(str(beacon))["sees_runs"]
    beacon.touch()
    seen = ssh.look(str(beacon))
    assert (seen["sees_runs"], seen["address"]) == (True, "10.0.0.2")


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_transient_error_of_the_file_server_ends_no_run(run, monkeypatch, number, capsys):
    def stumbles(*_):
        raise OSError(number, os.strerror(number))

    watching_node = object.__new__(node.NodeSupervisor)
    watching_node.node, watching_node.peer_ended = 0, None
    progress = Progress(run)
    monkeypatch.setattr(progress, "update", stumbles)
    assert watching_node.watch(run, progress) is None
    assert os.strerror(number) in capsys.readouterr().out

    monkeypatch.setattr(type(run.state), "lstat", stumbles)
    assert not is_deleted(run.state)
    monkeypatch.undo()
    assert not is_deleted(run.state)
    assert is_deleted(run.path / "no" / "state.json")
    assert is_deleted(run.state / "in a file")


def test_gpus_that_a_run_holds_on_a_host_are_not_given_to_another(run, folder, monkeypatch):
    monkeypatch.setattr(locks, "active_runs", lambda: [folder])
    manifest = json.loads(run.manifest.read_text())
    write_json(run.manifest, manifest | {"gpus": ["0", "1"]})
    with pytest.raises(LaunchError, match=r"uses GPU 0, 1\. Wait for it"):
        ssh.begin(str(run.path), 0, ["true"], {})
    monkeypatch.setattr(ssh, "BEGINNING_SECONDS", 0.0)
    with pytest.raises(LaunchError, match="has not started"):
        ssh.begin(str(run.path), 0, ["sleep", "9"], {"LABKIT_SHARE_GPUS": "1"})


@pytest.mark.parametrize(
    ("wanted", "held", "free"),
    [
        (["0"], ["GPU-aa11"], ["1", "2"]),
        (["GPU-bb22"], ["1"], ["0", "2"]),
        (["GPU-b"], ["GPU-bb22"], ["0", "2"]),
        (["GPU-aa11"], ["1"], None),
        (["1"], ["10"], None),
        (["MIG-cc33"], ["MIG-c"], ["0", "1"]),
        (["MIG-cc33"], ["0", "GPU-bb22"], None),
    ],
)
def test_with_torchs_answer_faked_a_gpu_is_one_card_by_index_uuid_or_the_beginning_of_it(
    run, monkeypatch, wanted, held, free
):
    asked = []
    monkeypatch.setattr(locks, "active_runs", lambda: [run])
    monkeypatch.setattr(locks, "torch_report", lambda names: asked.append(names) or {"uuids": ["aa11", "bb22", "dd44"]})
    write_json(run.manifest, json.loads(run.manifest.read_text()) | {"gpus": held})

    with pytest.raises(LaunchError, match=f"uses GPU {wanted[0]}. Wait") if free else nullcontext():
        locks.check_gpus_are_free(wanted)

    mixed = len({name.isdecimal() for name in wanted + held}) == 2
    assert [names.split(",")[:3] for names in asked] == [["0", "1", "2"]] * mixed
    if free:
        assert Room(1, 3, ("0", "1", "2"), 2, 1).free_gpus() == free


def test_runs_whose_gpus_torch_cannot_tell_apart_are_refused_with_its_failure_faked(run, monkeypatch):
    def fails(_):
        raise GpusUnknownError("torch could not list the GPUs: timeout")

    monkeypatch.setattr(locks, "active_runs", lambda: [run])
    monkeypatch.setattr(locks, "torch_report", fails)
    write_json(run.manifest, json.loads(run.manifest.read_text()) | {"gpus": ["GPU-aa11"]})
    with pytest.raises(LaunchError, match=r"by index and by UUID \(0, GPU-aa11\).*Use one kind of id.*could not list"):
        locks.check_gpus_are_free(["0"])


def test_a_part_of_a_run_that_does_not_begin_in_time_is_not_left_to_begin_later(run, monkeypatch):
    monkeypatch.setattr(ssh, "BEGINNING_SECONDS", 0.3)
    began = time.time()
    with pytest.raises(LaunchError, match="the supervisor of its ranks has not started"):
        ssh.begin(str(run.path), 0, ["sleep", "60"], {})
    assert not [p for p in psutil.Process().children() if p.create_time() >= began - 1]


def commands():
    return [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]


def test_an_interrupt_while_hosts_start_leaves_nothing_of_the_run(runs_dir, monkeypatch):
    asked = ssh.ask

    def interrupted(host, question, **request):
        answer = asked(host, question, **request)
        if question == "begin" and request["node"] == 1:
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(hosts, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        options = LaunchOptions(hosts=["localhost", "localhost"], nproc_per_node=1, env={"CUDA_VISIBLE_DEVICES": ""})
        hosts.begin("ddp", options, {"steps": 100_000}, tied=False)
    assert not list(runs_dir.glob("*"))
    deadline = time.monotonic() + 30
    while left := [c for c in commands() if str(runs_dir) in c]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_node_is_not_started_where_the_run_folder_is_missing(tmp_path):
    with pytest.raises(LaunchError, match="runs_dir must be on a file system that all hosts share"):
        ssh.begin(str(tmp_path / "run"), 0, ["true"], {})
