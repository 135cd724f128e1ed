"""What happens to a kernel and what becomes of its runs: from a cell, from a thread, from a button's callback, each is
left going where somebody can come back to it, and ended where nobody can."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from faults.scene import (
    ENDLESS,
    FAULTY,
    SHARED_MACHINE,
    Kernel,
    Written,
    assert_clean,
    assert_goes_on,
    gaps,
    in_another_process,
    last_step,
    marked,
    read,
    stopped_at_the_end,
    wait_for_step,
    wait_until,
    written,
)

import labkit
from labkit.record import RunFolder
from labkit.stored_runs import list_runs

BOUND = 8.0  # seconds
SETUP = f"""
import threading, time
import ipywidgets, labkit
def launch(name, ranks=1, **options):
    return labkit.launch({str(FAULTY)!r}, nproc_per_node=ranks, name=name, steps={ENDLESS}, **options)
"""
# The last one is a cell: where launch waits for the end, nothing else is run in the kernel after it.
STARTS = {
    "thread": "threading.Thread(target=launch, args=('thread',)).start()",
    "button": """
button = ipywidgets.Button(description="Train")
button.on_click(lambda _: launch("button"))
threading.Thread(target=button.click).start()
""",
    "cell": "launch('cell', ranks=2)",
}
LOOK = """
import json, labkit
def seen(run):
    steps = run.metrics()[["rank", "step", "steps"]].astype(int).values.tolist()
    return {"id": run.id, "state": run.status().state, "steps": steps}
print("seen:", json.dumps([seen(labkit.attach(which)) for which in ["latest", *WHICH]]))
"""


@pytest.fixture
def kernels() -> Iterator[Callable[[str], Kernel]]:
    """`kernels(ui)` starts one."""
    started: list[Kernel] = []

    def start(ui: str) -> Kernel:
        started.append(Kernel(os.environ | {"LABKIT_UI": ui}))
        return started[-1]

    with stopped_at_the_end():
        yield start
    for kernel in started:
        kernel.close()


def launch_everywhere(kernel: Kernel) -> dict[str, RunFolder]:
    """A run from a thread, one from a button's callback and one from a cell, all of them training."""
    kernel.run(SETUP)
    for start in STARTS.values():
        kernel.client.execute(start)
    wait_until(lambda: len(list_runs()) == len(STARTS), 30, list_runs)
    runs = {str(folder.id.split("-")[1]): folder for folder in list_runs()}
    assert runs.keys() == STARTS.keys()
    for folder in runs.values():
        wait_for_step(folder)
    return runs


def restart(kernel: Kernel) -> None:
    kernel.client.stop_channels()
    kernel.manager.restart_kernel(now=False)


def restart_now(kernel: Kernel) -> None:
    kernel.client.stop_channels()
    kernel.manager.restart_kernel(now=True)


def shutdown(kernel: Kernel) -> None:
    kernel.manager.shutdown_kernel(now=False)


def sigkill(kernel: Kernel) -> None:
    os.kill(kernel.pid, signal.SIGKILL)


def assert_attach_sees_every_step(
    runs: dict[str, RunFolder], before: dict[str, Written], kernel: Kernel | None
) -> None:
    """From a kernel or, without one, from a fresh process."""
    known = {name: [last_step(folder, rank) for rank in folder.started_ranks()] for name, folder in runs.items()}
    code = f"WHICH = {[folder.id for folder in runs.values()]}" + LOOK
    said = kernel.run(code) if kernel else in_another_process(code)
    latest, *each = json.loads(said.partition("seen: ")[2])
    assert latest["id"] == list_runs()[-1].id
    for (name, folder), told in zip(runs.items(), each, strict=True):
        assert (told["id"], told["state"]) == (folder.id, "running")
        for rank, step in enumerate(known[name]):
            steps = [(at, n) for of, at, n in told["steps"] if of == rank]
            assert gaps(steps) == []
            assert steps[-1][0] >= step > 0
        assert_goes_on(folder, before[name])


def soaked(*events):
    return [pytest.param(event, marks=pytest.mark.soak) for event in events]


@pytest.mark.parametrize("event", [sigkill, *soaked(restart_now, shutdown)])
def test_interactive_runs_go_on_without_their_kernel(event, kernels) -> None:
    """An interrupt of another cell first, then a restart: these must not have reached them either."""
    kernel = kernels("svg")
    runs = launch_everywhere(kernel)
    before = {name: written(folder) for name, folder in runs.items()}
    kernel.client.execute("time.sleep(60)", stop_on_error=False)
    time.sleep(0.5)
    kernel.manager.interrupt_kernel()
    assert "alive" in kernel.run("print('alive')", BOUND)
    for name, folder in runs.items():
        assert_goes_on(folder, before[name])
    before = {name: written(folder) for name, folder in runs.items()}

    restart(kernel)
    kernel.connect()
    assert_attach_sees_every_step(runs, before, kernel)
    before = {name: written(folder) for name, folder in runs.items()}

    event(kernel)

    if event is restart_now:
        kernel.connect()
        assert_attach_sees_every_step(runs, before, kernel)
    else:
        assert_attach_sees_every_step(runs, before, None)


@pytest.mark.parametrize("event", [sigkill, *soaked(restart, restart_now, shutdown)])
def test_batch_runs_go_with_their_kernel(event, kernels) -> None:
    kernel = kernels("static")
    runs = launch_everywhere(kernel)
    before = {name: written(folder) for name, folder in runs.items()}

    event(kernel)

    deadline = time.monotonic() + BOUND * SHARED_MACHINE
    for name, folder in runs.items():
        told = assert_clean(folder, before[name], within=(deadline - time.monotonic()) / SHARED_MACHINE)
        gone = "the process that started this run has exited"
        # A polite restart or shutdown may interrupt the cell that waits, which stops its run.
        assert told["cause"]["sentence"] in (gone, "stopped on request")
        assert told["cause"]["sentence"] == gone or name == "cell"


@pytest.mark.soak
def test_an_interrupt_in_batch_ends_what_the_cell_waits_for_and_the_kernels_end_the_others(kernels) -> None:
    kernel = kernels("static")
    runs = launch_everywhere(kernel)
    before = {name: written(folder) for name, folder in runs.items()}

    kernel.manager.interrupt_kernel()

    assert assert_clean(runs["cell"], before["cell"])["cause"]["sentence"] == "stopped on request"
    for name in ("thread", "button"):
        assert_goes_on(runs[name], before[name])
    kernel.manager.shutdown_kernel(now=True)
    for name in ("thread", "button"):
        assert_clean(runs[name], before[name])


def test_what_is_launched_with_detach_or_tied_in_words_outlives_a_kernel_or_not(kernels) -> None:
    """`detach` says otherwise, in both modes."""
    before: dict[str, Written] = {}
    runs: dict[str, RunFolder] = {}
    started = {ui: kernels(ui) for ui in ("svg", "static")}
    for ui, kernel in started.items():
        kernel.run(SETUP + f"launch({ui!r}, wait=False, detach={ui == 'static'})")
        runs[ui] = list_runs()[-1]
    for ui, kernel in started.items():
        before[ui] = written(wait_for_step(runs[ui]))
        sigkill(kernel)
    assert_clean(runs["svg"], before["svg"])
    assert_attach_sees_every_step({"static": runs["static"]}, before, None)


@pytest.mark.soak  # test_stop.py does it from two processes
def test_two_kernels_stop_one_run_at_the_same_time(kernels) -> None:
    first, second = kernels("svg"), kernels("svg")
    first.run(SETUP + "run = launch('shared', ranks=2)")
    (folder,) = list_runs()
    second.run("import labkit\nrun = labkit.attach('latest')\nrun")
    before = written(wait_for_step(folder))

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda kernel: kernel.run("print(run.stop().state)"), (first, second)))

    told = assert_clean(folder, before)
    assert told["cause"]["sentence"] == "stopped on request"
    for text in said:
        assert text.rstrip().endswith("stopped")
        assert "0 processes left" in text
    assert [kernel.run("print(run.wait().state)").strip() for kernel in (first, second)] == ["stopped", "stopped"]


@pytest.mark.soak
def test_a_busy_kernel_does_not_slow_a_run_that_prints(kernels) -> None:
    """One that holds the GIL for most of a second at a time: no thread of the kernel's runs, nor the live view's."""
    work = "import re\nend = time.monotonic() + 6\nwhile time.monotonic() < end: re.match('(a+)+$', 'a' * 22 + 'b')"
    kernel = kernels("svg")
    lines = 200
    kernel.run(SETUP + f"run = launch('talk', ranks=2, lines={lines})")
    (folder,) = list_runs()
    before = written(wait_for_step(folder))

    def steps_in(seconds: float) -> int:
        since = last_step(folder, 0)
        time.sleep(seconds)
        return last_step(folder, 0) - since

    idle = steps_in(3)
    kernel.client.execute(work)
    time.sleep(1)
    busy = steps_in(3)

    assert idle > 15
    assert busy > idle / 2, f"{busy} steps in 3 s, {idle} while the kernel was idle"
    assert "alive" in kernel.run("print('alive')", 2 * BOUND)
    assert_goes_on(folder, before)
    assert labkit.Run(folder).stop().state == "stopped"
    step = last_step(folder, 1)
    assert folder.log(1).read_text().count(f"rank 1 step {step} line ") >= 1
    assert sum(1 for _ in folder.log(1).open()) >= step * lines
    assert not marked(folder)
    assert read(folder.state)["cause"]["sentence"] == "stopped on request"
