"""papermill, and what can befall it while a notebook trains: it ends with an error, and the training ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from faults.scene import ENDLESS, FAULTY, SHARED_MACHINE, assert_clean, the_run, wait_for_step, written

BOUND = 10.0  # seconds
LAUNCH = f"import labkit\nrun = labkit.launch({str(FAULTY)!r}, nproc_per_node=2, steps={ENDLESS})"
UNTIL_TOLD = "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.1)"
# The owner is gone, or what waited was interrupted.
GONE, STOPPED = "the process that started this run has exited", "stopped on request"


@pytest.fixture
def papermill(tmp_path: Path) -> Iterator[Callable[..., psutil.Popen]]:
    """`papermill(cells, *options)` runs them as in.ipynb, to out.ipynb, in the test's folder."""
    started: list[psutil.Popen] = []

    def start(cells: list[str], *options: str) -> psutil.Popen:
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
        book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(book, tmp_path / "in.ipynb")
        command = [sys.executable, "-m", "papermill", "--no-progress-bar", *options, "in.ipynb", "out.ipynb"]
        said = (tmp_path / "papermill.log").open("wb")
        started.append(psutil.Popen(command, cwd=tmp_path, stdout=said, stderr=subprocess.STDOUT))
        return started[-1]

    yield start
    for process in started:
        if process.is_running():
            process.kill()
            process.wait()


def kernel_of(process: psutil.Popen) -> psutil.Process:
    (kernel,) = [p for p in process.children(recursive=True) if "ipykernel_launcher" in p.cmdline()]
    return kernel


def assert_kernel_ended(kernel: psutil.Process) -> None:
    _, alive = psutil.wait_procs([kernel], timeout=BOUND * SHARED_MACHINE)
    assert not alive


@pytest.mark.parametrize(
    ("end", "codes", "why"),
    [
        pytest.param("kernel", range(1, 256), GONE, marks=pytest.mark.soak),  # test_kernels.py, as every batch kernel
        (signal.SIGINT, range(1, 256), STOPPED),
        pytest.param(signal.SIGTERM, [-signal.SIGTERM], GONE, marks=pytest.mark.soak),
        (signal.SIGKILL, [-signal.SIGKILL], GONE),
    ],
    ids=["kernel killed", "INT", "TERM", "KILL"],
)
def test_a_training_ends_with_papermill_or_its_kernel(end, codes, why, papermill, tmp_path) -> None:
    process = papermill([LAUNCH, "print('not reached')"])
    folder = wait_for_step(the_run())
    before, kernel = written(folder), kernel_of(process)

    if end == "kernel":
        kernel.kill()
    else:
        process.send_signal(end)

    told = assert_clean(folder, before, within=BOUND)
    assert process.wait(BOUND * SHARED_MACHINE) in codes
    assert told["cause"]["sentence"] in (why, GONE)
    assert_kernel_ended(kernel)
    book = nbformat.read(tmp_path / "out.ipynb", 4)
    assert not book.cells[-1].outputs


def test_a_training_that_is_not_over_ends_with_the_cell_that_fails(papermill, tmp_path) -> None:
    """One that nobody waits for, in the same kernel."""
    process = papermill([LAUNCH[:-1] + ", wait=False)", UNTIL_TOLD, "1 / 0", "print('not reached')"])
    folder = wait_for_step(the_run())
    before, kernel = written(folder), kernel_of(process)

    (tmp_path / "go").touch()

    assert assert_clean(folder, before, within=BOUND)["cause"]["sentence"] == GONE
    assert process.wait(BOUND * SHARED_MACHINE) == 1
    assert_kernel_ended(kernel)
    assert "ZeroDivisionError" in (tmp_path / "papermill.log").read_text()
    assert not nbformat.read(tmp_path / "out.ipynb", 4).cells[-1].outputs


@pytest.mark.soak
def test_a_cell_that_takes_longer_than_papermill_allows_ends_its_training(papermill, tmp_path) -> None:
    process = papermill([LAUNCH, "print('not reached')"], "--execution-timeout", "20")
    folder = wait_for_step(the_run(), 60)
    before, kernel = written(folder), kernel_of(process)

    told = assert_clean(folder, before, within=20 + BOUND)

    assert process.wait(BOUND * SHARED_MACHINE) == 1
    assert told["cause"]["sentence"] in (STOPPED, GONE)
    assert told["ended"] - told["started"] < 20 + BOUND * SHARED_MACHINE
    assert_kernel_ended(kernel)
    assert "imeout" in (tmp_path / "papermill.log").read_text()
    assert not nbformat.read(tmp_path / "out.ipynb", 4).cells[-1].outputs
