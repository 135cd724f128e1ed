"""torchrun and its ranks are forks of a process that has imported torch: the supervisor, and from the second launch on
the warm process. What a run promises stays."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch  # noqa: F401  # the process that is asked has imported it
from faults.scene import ENDLESS, FAULTY, assert_clean, last_step, read, wait_for_step, wait_until

import labkit
from labkit.launcher import prepare
from labkit.launcher.warm import fork, session
from labkit.launcher.warm.eligibility import READ_WHEN_LOADED
from labkit.launcher.warm.process import receive

pytestmark = pytest.mark.skipif(not session.FORKS, reason="only Linux's processes are forked")
PRINTS = """
import json, multiprocessing, os, random, sys, time
import numpy, torch
from threadpoolctl import threadpool_info


def opened(descriptor):
    return os.path.basename(os.path.realpath(f"/proc/self/fd/{descriptor}")).partition(":")[0]


print(json.dumps({
    "folder": os.getcwd(), "mine": os.getenv("MINE"), "place": os.getenv("LABKIT_PLACE"), "argv": sys.argv[1:],
    # torch 2.8 adds a temporary folder, as soon as an optimizer imports torch._dynamo
    "path": [path for path in sys.path if not os.path.basename(path).startswith("tmp")],
    "flags": repr(sys.flags), "umask": os.umask(0), "session": os.getsid(0) == os.getpid(),
    "signals": [str(__import__("signal").getsignal(n)) for n in (2, 10, 15, 17)], "name": __name__,
    "torch threads": torch.get_num_threads(), "safe": sys.flags.safe_path,
    "threads": sorted((p["user_api"], p["num_threads"]) for p in threadpool_info()),
    "process": multiprocessing.current_process().name, "start": multiprocessing.process.ORIGINAL_DIR,
    "buffered": sys.stdout.write_through, "main": sys.modules["__main__"].__file__,
    "descriptors": sorted(map(opened, os.listdir("/proc/self/fd"))),
    "time": time.strftime("%H", time.gmtime(0)) + time.strftime("%H", time.localtime(0)),
    "command": [*map(os.path.basename, sys.orig_argv)],
    "forked": "labkit.launcher.warm.fork" in sys.modules,
    "random": [random.random(), numpy.random.random(), torch.rand(()).item()],
}))
"""
NOISY = """
import sys


class Noisy:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch is imported", file=sys.stderr, flush=True)


sys.meta_path.insert(0, Noisy())
"""
TWICE = f"""
import labkit
from labkit.launcher.warm import session
labkit.launch({str(FAULTY)!r}, nproc_per_node=1, steps=1, detach=False, wait=True)
print(session._warm[0].process.pid, flush=True)
for name, detach in (("tied", False), ("free", True)):
    labkit.launch({str(FAULTY)!r}, nproc_per_node=1, steps={ENDLESS}, name=name, detach=detach, wait=False)
input()
"""


FIRST = f"""
import sys, labkit
launch = dict(nproc_per_node=2, steps={ENDLESS}, detach=False, wait=False)
run = labkit.launch({str(FAULTY)!r}, **launch)
input()
print(run.stop().state, flush=True)
"""


def launch(*args: object, **options: Any) -> labkit.Run:
    return labkit.launch(FAULTY, nproc_per_node=1, args=list(args), wait=False, **options)


@pytest.fixture
def warm() -> int:
    """The pid of this process's warm process, which imports torch now."""
    launch("--steps", 1).wait()  # replaces one that tests with other variables have left
    return session._warm[0].process.pid


@pytest.fixture
def kernel(runs_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A session that has just launched its first run, which it stops when it reads a line."""
    command = [sys.executable, "-c", FIRST]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as kernel:
        wait_until(lambda: len(labkit.runs()) == 1)
        yield kernel
        kernel.kill()


def test_the_first_run_s_ranks_are_forks_of_its_supervisor(kernel: subprocess.Popen[str]) -> None:
    (run,) = labkit.runs()
    wait_for_step(run, 2)
    ranks = psutil.Process(read(run.folder.agent)["agent"]["pid"]).children()
    assert len(ranks) == 2

    for rank in ranks:
        assert [word for word in rank.cmdline() if word][1:3] == ["-u", str(run.folder.guest)]
        assert rank.environ()["LABKIT_RUN"] == run.id
        assert rank.memory_full_info().uss < 150 << 20  # torch's libraries and modules are shared

    assert kernel.communicate("\n")[0].split()[-1] == "stopped"
    assert_clean(run)


def test_a_first_run_can_be_stopped_while_its_supervisor_imports_torch(kernel: subprocess.Popen[str]) -> None:
    (run,) = labkit.runs()
    began = time.monotonic()
    assert kernel.communicate("\n")[0].split()[-1] == "stopped"
    took = time.monotonic() - began

    assert not run.folder.started_ranks()
    assert_clean(run)
    assert took < 10


def test_torchrun_is_a_fork_that_looks_and_ends_like_any_other(
    warm: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launch("--fault", "raise", "--rank", 0, "--at", 3)
    assert run.folder.agent.exists()
    wait_for_step(run, 1)
    agent = psutil.Process(read(run.folder.agent)["agent"]["pid"])
    supervisor = agent.parent()
    shown = [word for word in agent.cmdline() if word]

    assert supervisor.ppid() == warm
    assert [word for word in supervisor.cmdline() if word][1:4] == [
        "-m",
        "labkit.launcher.supervisor",
        str(run.folder.path),
    ]
    assert shown == [*run.folder.read_manifest().torchrun]
    assert agent.environ()["LABKIT_RUN"] == run.id
    with pytest.raises(labkit.RankFailedError, match="boom"):
        run.wait()
    assert_clean(run, state="failed")

    assert session._warm[0].process.pid == warm


def seen(script: Path | labkit.Script, ranks: int = 1, **options: Any) -> list[dict[str, Any]]:
    run = labkit.launch(script, nproc_per_node=ranks, args=["a b", "--c"], wait=True, **options)
    return [json.loads(str(run.logs(rank=rank, stream="stdout"))) for rank in range(ranks)]


def test_a_rank_is_a_fork_that_sees_what_a_new_process_sees(
    warm: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its script looks, which is otherwise a reason for new processes."""
    monkeypatch.setattr(prepare, "why_new_processes", lambda *_: None)
    script = tmp_path / "prints.py"
    script.write_text(PRINTS)
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("MINE", "changed")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    forks = seen(script, 2)
    monkeypatch.setenv(session.VARIABLE, "0")
    new = seen(script, 2)

    drawn = [number for rank in (*forks, *new) for number in rank.pop("random")]
    assert len({*drawn}) == len(drawn)
    assert [rank.pop("forked") for rank in (*forks, *new)] == [True, True, False, False]
    for forked, other in zip(forks, new, strict=True):
        assert {k: (v, other[k]) for k, v in forked.items() if v != other[k]} == {}
    assert session._warm[0].process.pid == warm


def test_a_script_that_could_tell_is_run_by_new_processes_of_a_torchrun_that_is_a_fork(
    warm: int, tmp_path: Path
) -> None:
    script = tmp_path / "prints.py"
    script.write_text(PRINTS)

    assert not seen(script)[0]["forked"]

    assert labkit.attach().folder.read_manifest().new_processes == "line 24 uses sys.modules"
    assert session._warm[0].process.pid == warm


def test_ranks_are_new_processes_where_importing_torch_prints_something(tmp_path: Path) -> None:
    """Otherwise only the first process would print it."""
    (tmp_path / "sitecustomize.py").write_text(NOISY)
    (tmp_path / "train.py").write_text("import torch\n")
    code = "import labkit; labkit.launch('train.py', nproc_per_node=1, wait=True)"
    for _ in range(2):
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True)
        assert "torch is imported" in labkit.attach().logs(rank=0, stream="stderr")


def test_a_fork_whose_agent_ended_before_it_read_is_not_asked_anything() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b".")
    theirs.close()
    assert receive(ours) == (None, [])


def test_an_open_mock_gpu_is_seen_before_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork, "DEVICES", (str(tmp_path),))
    assert not fork.has_open_gpu()
    with (tmp_path / "nvidiactl").open("w"):
        assert fork.has_open_gpu()


def test_a_tied_run_goes_on_without_the_warm_process(warm: int) -> None:
    run = launch("--steps", ENDLESS, detach=False)
    step = last_step(wait_for_step(run, 1), 0)
    os.kill(warm, signal.SIGKILL)
    wait_for_step(run, step + 30)
    assert run.stop().state == "stopped"


def test_a_stop_kills_a_deaf_rank(warm: int) -> None:
    run = launch("--fault", "deaf", "--rank", 0, "--at", 2, "--steps", ENDLESS)
    wait_for_step(run, 3)
    assert psutil.Process(read(run.folder.agent)["supervisor"]["pid"]).ppid() == warm

    assert run.stop(grace=1).state == "stopped"
    assert assert_clean(run)["killed"] > 0


def test_what_a_fork_would_not_read_again_is_launched_without_it(warm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "+distributed")
    run = launch("--steps", 1)
    wait_for_step(run, 1)
    assert psutil.Process(warm).children() == []
    run.wait()


def test_when_the_kernel_is_killed_its_tied_runs_stop_and_the_others_go_on(runs_dir: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TWICE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as kernel:
        assert kernel.stdin and kernel.stdout
        pid = int(next(line for line in kernel.stdout if line.strip().isdigit()))
        wait_until(lambda: len(labkit.runs()) == 3)
        tied, free = ([r for r in labkit.runs() if name in r.id][0] for name in ("tied", "free"))
        for run in (tied, free):
            wait_for_step(run, 2)
            assert psutil.Process(read(run.folder.agent)["supervisor"]["pid"]).ppid() == pid
        kernel.send_signal(signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid), 10)
    assert "has exited" in json.dumps(assert_clean(tied)["cause"])
    step = last_step(free.folder, 0)
    wait_until(lambda: last_step(free.folder, 0) > step)
    assert free.stop().state == "stopped"
    assert_clean(free)


READ = """
import json, os
names, environment = set(), type(os.environ)
get = environment.__getitem__
environment.__getitem__ = lambda self, name: names.add(name) or get(self, name)
from labkit.launcher.warm.fork import import_torchrun
import_torchrun()
print(json.dumps(sorted(names)))
"""
# What ranks of all launches share (see eligibility.py), or what changes nothing in a training.
ALIKE = (*READ_WHEN_LOADED, "CI", "LNAME", "NVPL_", "PSUTIL_DEBUG", "SAGE_ROOT", "_PYTHON_")


def test_a_variable_that_torch_reads_when_it_is_imported_decides_whether_a_warm_process_fits() -> None:
    few = {"PATH": os.environ["PATH"]}  # something reads all variables that there are
    done = subprocess.run(
        [sys.executable, "-c", READ], capture_output=True, text=True, timeout=120, check=True, env=few
    )
    read = json.loads(done.stdout.splitlines()[-1])
    assert "TORCH_LOGS" in read
    assert [name for name in read if not name.startswith((*session.READ_AT_IMPORT, *ALIKE))] == []
