"""The names that torchrun looks up: this host's own may not resolve, the name server be silent, localhost be gone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

HELLO = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(int(total))
dist.destroy_process_group()
"""
# In a network of its own, on a host of another name.
SETUP = """
ip link set lo up
echo 'nameserver {server}' > {folder}/resolv.conf && mount --bind {folder}/resolv.conf /etc/resolv.conf
echo '{hosts}' > {folder}/hosts && mount --bind {folder}/hosts /etc/hosts
hostname not-in-hosts
{more}
{python} {folder}/follow.py
"""
SILENT = """{python} -c "import socket, time; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('127.0.0.1', 53))
print('bound', flush=True); time.sleep(300)" > {folder}/bound & server=$!
until grep -q bound {folder}/bound; do sleep 0.1; done; trap "kill $server" EXIT"""
# Prints the state when `until` is true, and the seconds until then.
FOLLOW = """
import time
import labkit
started = time.monotonic()
run = labkit.launch({script!r}, nproc_per_node=2, wait=False, detach=True)
while time.monotonic() < started + 60:
    state = run.status()
    if {until}:
        break
    time.sleep(0.1)
print(state.state, round(time.monotonic() - started), state.notice, run.logs(rank=0, stream="stdout").strip(), sep="|")
run.stop(grace=0)
"""


def is_possible() -> bool:
    if os.getuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
        return False
    return subprocess.run(["unshare", "-n", "-m", "-u", "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not is_possible(), reason="needs root, for network, mount and host name namespaces")


@pytest.fixture
def follow(tmp_path, runs_dir):
    """`follow(server=…, hosts=…)`: what a launch there comes to: state, seconds, notice, rank 0's output."""

    def run(
        server: str = "127.0.0.2",
        hosts: str = "127.0.0.1 localhost",
        more: str = "",
        until: str = "state.is_final or state.notice",
    ) -> list[str]:
        (tmp_path / "hello.py").write_text(HELLO)
        (tmp_path / "follow.py").write_text(FOLLOW.format(script=str(tmp_path / "hello.py"), until=until))
        names = {"folder": tmp_path, "python": sys.executable}
        setup = SETUP.format(server=server, hosts=hosts, more=more.format(**names), **names)
        command = ["unshare", "-n", "-m", "-u", "sh", "-c", setup]
        told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=150).stdout
        return next(line for line in told.splitlines() if line.count("|") == 3).split("|")

    return run


def test_a_host_whose_own_name_does_not_resolve_trains(follow) -> None:
    state, _, notice, output = follow()

    assert (state, notice, output) == ("succeeded", "None", "2")


def test_a_host_without_ipv4_trains(follow) -> None:
    state, _, notice, output = follow(hosts="::1 localhost", more="ip addr del 127.0.0.1/8 dev lo")

    assert (state, notice, output) == ("succeeded", "None", "2")


def test_torchrun_does_not_wait_for_a_name_server_that_does_not_answer(follow) -> None:
    state, seconds, _, output = follow(server="127.0.0.1", more=SILENT, until="state.is_final")

    assert (state, output) == ("succeeded", "2")
    assert int(seconds) < 45  # 20 on a machine that does nothing else, of which 10 are torch's own in the ranks


def test_a_name_server_for_which_torchrun_is_told_to_wait_is_the_reason_why_no_rank_starts(follow) -> None:
    state, seconds, notice, _ = follow(server="127.0.0.1", more=f"{SILENT}; export RES_OPTIONS='timeout:5 attempts:2'")

    assert state == "running"
    assert notice.startswith("no name server answers for not-in-hosts, which torchrun looks up several times")
    assert notice.endswith("add the line `127.0.0.1 not-in-hosts` to /etc/hosts")
    assert int(seconds) < 30  # 10 on a machine that does nothing else


def test_a_host_on_which_localhost_does_not_resolve_is_told_so(follow) -> None:
    state, seconds, notice, _ = follow(hosts="127.0.0.1 another")

    assert state == "running"
    assert notice.startswith("localhost, to which torchrun connects, cannot be resolved (")
    assert int(seconds) < 30
