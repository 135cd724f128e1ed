"""What each fault looks like under bare torchrun and under labkit, on this machine.

python benchmarks/fault_table.py > docs/evidence/faults.md        (about twelve minutes)
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Collection
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from faults.matrix import FAULTS, FAULTY, GROUP_TIMEOUT, HANGS, LEAVING  # noqa: E402

import labkit  # noqa: E402
from labkit.files import read_json  # noqa: E402
from labkit.launcher.stopping import processes_of  # noqa: E402

MARK = "FAULT_TABLE"
ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\):.*?rank\s*: (\d+) .*?exitcode\s*: (-?\d+)", re.DOTALL)
FROM_OUTSIDE = {
    "torchrun itself is killed (SIGKILL)": ("none", "kill the agent"),
    "stopped, while the ranks ignore SIGTERM": ("deaf", "stop"),
    "Ctrl-C three times": ("deaf", "interrupt thrice"),
    "stopped, while a grandchild is in its own session": ("grandchild", "stop"),
    "stopped, while a daemon has cleared its environment and ignores SIGTERM": ("daemon", "stop"),
}
# A run without an end of its own is stopped by labkit's watchdog after GROUP_TIMEOUT seconds.
WITHOUT_A_TIME_LIMIT = {
    "one rank queues five collectives more": (HANGS, "queued"),
    "collectives of other sizes are queued": (HANGS, "sizes"),
    "each rank waits in another group": (HANGS, "order"),
    "a barrier of a second group on one rank": (HANGS, "second"),
    "one rank finishes and exits 20 s later (atexit)": (LEAVING, "atexit"),
}
LEFTOVERS = """
## What may be left after all

A run's supervisor inherits the processes that its ranks leave behind (Linux's `PR_SET_CHILD_SUBREAPER`). It can
therefore find a process by its parents even if the environment no longer identifies it: after `setproctitle`, a daemon
that cleared its environment, or a double fork into its own session (`tests/faults/test_orphans.py`). The following
processes are not ended, or not at once:

- **What a rank leaves running when the run succeeds**: it has a minute to end by itself
  ([Launch](../how_to/launch.md#what-outlives-what)). `labkit stop` ends it at once.
- **What frees a rank's shared memory** (torch's `torch_shm_manager`, multiprocessing's resource tracker): it ends by
  itself within 2 s after its rank, and is killed after 3 s; otherwise the memory would stay in use until a reboot.
- **Processes that another program starts for a rank**: `systemd-run`, `docker run`, `at`, cron, a tmux server or a
  Jupyter kernel that was already running, or ssh to another host. They are that program's children, and nothing links
  them to the rank.
- **A process that now runs as another user** (`sudo`, set-uid): the system does not let you signal it.
- **A process in an uninterruptible system call** (state D, for example on a file server that does not answer): it gets
  SIGKILL and dies when the call returns.
- **Daemons of a killed supervisor**: if the supervisor itself gets SIGKILL, torchrun and its ranks die with it, but
  init inherits their daemons. `labkit stop` ends those that carry the run's marker or were recorded (`processes.json`,
  once a second). It misses a daemon that cleared its environment less than a second before the supervisor died.
- **On macOS** the supervisor inherits nothing, so a process that cleared its environment and left its parent survives.
- **Another run** that a rank has launched is independent and continues until you stop it.
"""
SETTLE_SECONDS = 1.0
LIMIT_SECONDS = 60.0
START_SECONDS = 15.0


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            its = process.environ().get(MARK) == mark or process.cmdline()[:1] == [f"daemon-{mark}"]
            if its and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def bare(script: Path, arguments: list[str], act: str = "") -> str:
    """`said · seconds · left` of torchrun without labkit."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryFile() as log:
        agent = subprocess.Popen(
            [*command, str(script), *arguments],
            stdout=log,
            stderr=log,
            env=os.environ | {MARK: mark},
            start_new_session=True,
        )
        began = time.monotonic()
        if act:
            time.sleep(START_SECONDS)
            began = time.monotonic()
            {"kill the agent": agent.kill, "stop": agent.terminate, "interrupt thrice": lambda: thrice(agent)}[act]()
        try:
            agent.wait(LIMIT_SECONDS)
            ended = f"{time.monotonic() - began:.0f} s"
        except subprocess.TimeoutExpired:
            agent.kill()
            ended = f"still there after {LIMIT_SECONDS:.0f} s"
        time.sleep(SETTLE_SECONDS)
        left = marked(mark)
        for process in left:
            process.kill()
        log.seek(0)
        text = log.read().decode("utf-8", "replace")
    cause = ROOT_CAUSE.search(text)
    exit_code = "says nothing" if agent.returncode is None else f"exit code {agent.returncode}"
    said = f"blames rank {cause[1]} (exit code {cause[2]})" if cause else exit_code
    return f"{said}; {ended}; {_counted(left)} left"


def thrice(agent: subprocess.Popen[bytes]) -> None:
    for _ in range(3):
        agent.send_signal(2)
        time.sleep(0.5)


def with_labkit(script: Path, arguments: list[str], act: str = "") -> str:
    """The same under labkit: its sentence, seconds, what is left."""
    watchdog = GROUP_TIMEOUT if script == HANGS else None
    run = labkit.launch(script, nproc_per_node=2, args=arguments, watchdog=watchdog, wait=False)
    notice = ""
    began = time.monotonic()
    if act:
        time.sleep(START_SECONDS)
        began = time.monotonic()
        if act == "kill the agent":
            psutil.Process(read_json(run.folder.agent)["agent"]["pid"]).kill()
        else:
            run.stop()
    while not (state := run.status()).is_final:
        notice = f", after the notice: {state.notice}" if state.notice else notice
        time.sleep(0.05)
    seconds = time.monotonic() - began
    killed = f", {state.killed} of its processes had to be killed" if state.killed else ""
    sentence = f"{state.cause['sentence']}{killed}" if state.cause else state.state + notice
    left = {process.pid for process in (*processes_of(run.folder), *marked(run.id))}
    return f"{sentence}; {seconds:.0f} s; {_counted(left)} left"


def _counted(processes: Collection[object]) -> str:
    return f"{len(processes)} process{'' if len(processes) == 1 else 'es'}"


def row(what: str, script: Path, arguments: list[str], act: str = "") -> str:
    with contextlib.redirect_stdout(sys.stderr):  # what labkit says of itself
        both = [run(script, arguments, act).replace("|", "\\|").replace("<", "&lt;") for run in (bare, with_labkit)]
    return f"| {what} | {both[0]} | {both[1]} |"


def main() -> None:
    import torch

    print("<!-- written by: python benchmarks/fault_table.py > docs/evidence/faults.md -->")
    print("# Faults, under bare torchrun and under labkit\n")
    print(
        f"Two gloo ranks on this machine ({os.cpu_count()} cores, torch {torch.__version__}), one all-reduce per step, "
        f"the fault on rank 1 at step 5, process group timeout {GROUP_TIMEOUT} s. Seconds are from the launch, "
        "including startup, or from the stop or kill. labkit's watchdog ends hangs that no timeout ends, after "
        f"{GROUP_TIMEOUT} s. `tests/faults/` asserts the right column.\n"
    )
    print("| fault | bare torchrun | labkit |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as runs:
        os.environ["LABKIT_RUNS"] = runs
        for fault in FAULTS:
            print(row(fault.what, FAULTY, fault.arguments()), flush=True)
        for what, (script, argument) in WITHOUT_A_TIME_LIMIT.items():
            print(row(what, script, [argument]), flush=True)
        for what, (name, act) in FROM_OUTSIDE.items():
            print(row(what, FAULTY, ["--fault", name, "--steps", "2000"], act), flush=True)
    print(LEFTOVERS)


if __name__ == "__main__":
    main()
