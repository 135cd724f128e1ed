"""What a rank leaves running when it ends well, such as an upload: it has a minute, and nobody waits for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from faults.scene import assert_clean, read, the_run, wait_until

import labkit
from labkit.launcher import shutdown
from labkit.launcher.shutdown import Leftovers
from labkit.launcher.stopping import StopRequest
from labkit.record import RunFolder

# Rank 0 leaves an upload, which a session of its own and an empty environment hide, if they can.
TRAIN = """
import argparse, os, subprocess, sys
parser = argparse.ArgumentParser()
parser.add_argument("upload")
parser.add_argument("--checkpoint-dir")
args = parser.parse_args()
if os.environ["RANK"] == "0":
    subprocess.Popen([sys.executable, args.upload], env={}, start_new_session=True)
"""
UPLOAD = """
import pathlib, signal, time
{first}
time.sleep({seconds})
pathlib.Path({uploaded!r}).write_text("whole")
"""
SHARING = """
import os, sys, time, torch, torch.multiprocessing
from torch.utils.data import DataLoader
torch.multiprocessing.set_sharing_strategy("file_system")
shared = torch.zeros(100_000).share_memory_()
batches = iter(DataLoader(torch.zeros(64, 1000), batch_size=8, num_workers=2))
kept = [next(batches) for _ in range(3)]
own = tuple(f"torch_{pid}_" for pid in (os.getpid(), *(worker.pid for worker in batches._workers)))
(names := open(os.path.join(sys.argv[1], os.environ["RANK"]), "w")).write(
    " ".join(name for name in os.listdir("/dev/shm") if name.startswith(own))
)
names.close()
while len(os.listdir(sys.argv[1])) < 2:
    time.sleep(0.05)
if sys.argv[2] == "raise":
    raise ValueError("boom")
if sys.argv[2] == "kill":
    os.kill(os.getpid(), 9)
if sys.argv[2] == "stop":
    time.sleep(600)
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.fixture
def uploaded(tmp_path: Path) -> Path:
    return tmp_path / "uploaded"


def script(tmp_path: Path, uploaded: Path, seconds: float, first: str = "") -> tuple[Path, Path]:
    train, upload = tmp_path / "train.py", tmp_path / "upload.py"
    train.write_text(TRAIN)
    upload.write_text(UPLOAD.format(seconds=seconds, uploaded=str(uploaded), first=first))
    return train, upload


def launch(tmp_path: Path, uploaded: Path, seconds: float, first: str = "", **options) -> labkit.Run:
    train, upload = script(tmp_path, uploaded, seconds, first)
    return labkit.launch(train, nproc_per_node=2, args=[upload], wait=False, **options)


def test_an_upload_goes_on_after_the_run_has_succeeded_and_is_named(tmp_path, uploaded) -> None:
    run = launch(tmp_path, uploaded, seconds=8)

    state = run.wait()

    assert not uploaded.exists()
    assert (state.state, state.killed) == ("succeeded", 0)
    named = re.match(
        r"`python upload.py` \(pid (\d+)\) was still running when its ranks had ended, and had until", state.notice
    )
    assert psutil.Process(int(named[1])).cmdline()[-1].endswith("upload.py")
    final = run.folder.state.read_bytes()
    with pytest.raises(labkit.LabError, match="wait for that, or end it"):
        run.rm()
    assert labkit.runs().rm() == []
    wait_until(lambda: run.is_over, 30)
    assert uploaded.read_text() == "whole"
    assert read(run.folder.left_running)["killed"] == []
    assert assert_clean(run, state="succeeded")
    assert run.folder.state.read_bytes() == final
    assert named[0] in repr(run)
    run.rm()


def test_a_stop_ends_it_at_once_and_the_final_state_stays(tmp_path, uploaded, capfd) -> None:
    """It ignores TERM."""
    run = launch(tmp_path, uploaded, seconds=600, first=DEAF)
    run.wait()
    final = run.folder.state.read_bytes()

    state = run.stop(grace=1)

    assert (state.state, state.killed) == ("succeeded", 1)
    assert "had already ended, succeeded; 1 had to be killed; 0 processes left" in capfd.readouterr().out
    wait_until(lambda: run.is_over, 30)
    assert_clean(run, state="succeeded")
    assert run.folder.state.read_bytes() == final
    (killed,) = read(run.folder.left_running)["killed"]
    assert f"labkit ended {killed} at " in repr(run)


def test_the_end_of_the_process_that_launched_the_run_is_no_reason_to_end_it(tmp_path, uploaded) -> None:
    train, upload = script(tmp_path, uploaded, seconds=8)

    launched = subprocess.run(["labkit", "launch", train, "--nproc-per-node", "2", "--", upload], capture_output=True)

    assert launched.returncode == 0
    assert b"`python upload.py` (pid " in launched.stdout
    assert not uploaded.exists()
    run = labkit.attach(the_run().path)
    wait_until(lambda: run.is_over, 30)
    assert uploaded.exists()
    assert_clean(run, state="succeeded")


def test_another_run_may_save_to_the_same_folder_at_once(tmp_path, uploaded) -> None:
    first = launch(tmp_path, uploaded, seconds=20, checkpoint_dir=tmp_path / "saved")
    first.wait()

    began = time.monotonic()
    second = launch(tmp_path, uploaded, seconds=0, checkpoint_dir=tmp_path / "saved")

    assert time.monotonic() - began < 5
    assert not first.is_over
    second.wait()
    for run in (first, second):
        run.stop()
        assert_clean(run, state="succeeded")


@pytest.mark.parametrize("is_deleted", [True, False], ids=["deleted", "moved"])
def test_it_ends_with_the_folder_of_the_run_and_goes_on_where_that_is_moved(is_deleted, tmp_path, uploaded) -> None:
    run = launch(tmp_path, uploaded, seconds=600 if is_deleted else 4)
    run.wait()
    supervisor = psutil.Process(read(run.folder.agent)["supervisor"]["pid"])

    if is_deleted:
        shutil.rmtree(run.path, ignore_errors=True)  # its supervisor may just delete a file there
    else:
        moved = labkit.attach(run.path.rename(tmp_path / run.id))

    wait_until(lambda: not supervisor.is_running() or supervisor.status() == psutil.STATUS_ZOMBIE, 30)
    assert uploaded.exists() == (not is_deleted)
    assert not run.path.exists()
    if not is_deleted:
        assert moved.is_over
        assert read(moved.folder.left_running)["ended"]


@pytest.mark.parametrize("end", ["return", "raise", "kill", "stop"])
def test_shared_memory_is_free_again_however_a_run_ends(end, tmp_path) -> None:
    """torch's manager frees it when it sees that its ranks are dead, which takes it a moment."""
    (names := tmp_path / "names").mkdir()
    (train := tmp_path / "train.py").write_text(SHARING)
    run = labkit.launch(train, nproc_per_node=2, args=[names, end], wait=False)
    wait_until(lambda: len([*names.iterdir()]) == 2 and all(path.read_text() for path in names.iterdir()))
    if end == "stop":
        run.stop()
    wait_until(lambda: run.is_over)

    shared = {name for path in names.iterdir() for name in path.read_text().split()}
    assert len(shared) >= 4
    wait_until(lambda: not any(Path("/dev/shm", name).exists() for name in shared), 10, lambda: shared)
    told = assert_clean(run, state={"return": "succeeded", "stop": "stopped"}.get(end, "failed"))
    assert not told["notice"]


def with_helper(run: RunFolder, seconds: float) -> subprocess.Popen:
    command = [sys.executable, "-c", f"import time; time.sleep({seconds})"]
    return subprocess.Popen(command, env=os.environ | {"LABKIT_RUN": run.marker})


def test_when_the_time_is_up_it_is_ended(runs_dir, monkeypatch) -> None:
    run = RunFolder.create(runs_dir, "left")
    helper = with_helper(run, seconds=600)
    left = Leftovers(run, run, seconds=1)
    began = time.monotonic()

    left.outlive(lambda: time.sleep(0.1))

    assert helper.wait(5) == -15
    assert 0.5 < time.monotonic() - began < 5
    assert read(run.left_running)["killed"] == [f"`python -c …` (pid {helper.pid})"]
    assert left.notice.startswith(f"`python -c …` (pid {helper.pid}) was still running")


def test_what_it_starts_meanwhile_is_waited_for_too(runs_dir) -> None:
    run = RunFolder.create(runs_dir, "left")
    first = with_helper(run, seconds=1)
    left = Leftovers(run, run, seconds=60)
    helpers = [first]

    def start_another() -> StopRequest | None:
        if len(helpers) == 1:
            helpers.append(with_helper(run, seconds=3))
        time.sleep(0.1)
        return None

    left.outlive(start_another)

    assert [helper.wait(1) for helper in helpers] == [0, 0]
    assert read(run.left_running)["killed"] == []


def test_a_run_of_slurm_does_not_hold_its_nodes_for_it(runs_dir) -> None:
    run = RunFolder.create(runs_dir, "left")
    helper = with_helper(run, seconds=600)

    left = Leftovers(run, run, seconds=0)

    assert helper.wait(1) != 0
    assert left.notice.endswith("was still running when its ranks had ended, and ended with the job")


@pytest.mark.soak
def test_it_has_a_minute(tmp_path, uploaded) -> None:
    run = launch(tmp_path, uploaded, seconds=600)
    run.wait()
    began = time.monotonic()

    wait_until(lambda: run.is_over)

    assert shutdown.LEFT_SECONDS - 5 < time.monotonic() - began < shutdown.LEFT_SECONDS + 10
    assert len(read(run.folder.left_running)["killed"]) == 1
    assert_clean(run, state="succeeded")
