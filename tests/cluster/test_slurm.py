"""The launch file and the run on a real Slurm of two nodes, made and taken down here."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.slurm_cluster import Cluster, why_not

from labkit.cluster.sbatch import LaunchFile, sbatch_text
from labkit.record import Nodes

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(300)]

SCRIPTS = Path(__file__).parents[2] / "scripts"
SAVING_SECONDS = 30
SHARED_MACHINE = 2
LOSS = re.compile(r"^0: step (\d+) .*?loss ([\d.]+)", re.MULTILINE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as two_nodes:
        yield two_nodes


@pytest.fixture(autouse=True)
def on_the_cluster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Slurm's commands speak to it; after each test no job and no process of one is left on either node."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    yield
    subprocess.run(["scancel", "--user=root"], check=True)
    wait_until(lambda: not cluster.jobs(), 30, "a job is left")
    wait_until(lambda: not cluster.processes(), 10, f"left on the nodes: {cluster.processes()}")


@pytest.fixture
def text_files(tmp_path: Path) -> Path:
    """So little to train on that a test's evaluation takes a second."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_bytes((SCRIPTS / "ddp.py").read_bytes()[:20_000])
    return folder


def wait_until(true, seconds: float = 60, what: object = ""):
    deadline = time.monotonic() + seconds * SHARED_MACHINE
    while not (value := true()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds * SHARED_MACHINE:g} s: {what() if callable(what) else what}")
        time.sleep(0.1)
    return value


class PlainJob:
    """A launch file without labkit, submitted by hand."""

    def __init__(self, cluster: Cluster, folder: Path, *args: str, name: str = "job", time: str = "00:10:00"):
        folder.mkdir(exist_ok=True)
        self.cluster, self.output, self.checkpoints = cluster, folder / "out.txt", folder / "checkpoints"
        file = folder / "job.sbatch"
        program = [str(SCRIPTS / "ddp.py"), "--checkpoint-dir", str(self.checkpoints), *args]
        file.write_text(sbatch_text(LaunchFile(
            name=name, nodes=Nodes(2, 1), time=time, cwd=str(folder), output=str(self.output), python=sys.executable,
            program=program, checkpoints=str(self.checkpoints), cpus_per_task=2, saving_seconds=SAVING_SECONDS,
        )))  # fmt: skip
        done = subprocess.run(["sbatch", "--parsable", file], capture_output=True, text=True, cwd="/")
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()

    @property
    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    @property
    def losses(self) -> dict[int, str]:
        return dict((int(step), loss) for step, loss in LOSS.findall(self.said))

    def state(self) -> str:
        return self.cluster.jobs("all").get(self.id, "")

    def ends(self, seconds: float = 60) -> str:
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        return wait_until(lambda: (state := self.state()) in over and state, seconds, lambda: self.said[-3000:])


def test_a_plain_job_saves_when_its_time_is_up_and_goes_on_from_there(cluster, tmp_path, text_files):
    options = ["--data-dir", str(text_files), "--global-batch-size", "4"]
    job = PlainJob(cluster, tmp_path / "whole", *options, "--steps", "30")
    whole = job.ends() and job.losses

    job = PlainJob(cluster, tmp_path / "odd 'name' $HOME %j é", *options, "--steps", "30", name="odd 'name' $HOME é")
    wait_until(lambda: 3 in job.losses, 60, lambda: job.said)
    # what Slurm does when the time is nearly up; it looks every 30 s, which a test need not wait for
    subprocess.run(["scancel", "--batch", "--signal=USR1", job.id], check=True)
    assert job.ends(90) == "COMPLETED"

    assert "the time limit is near: the ranks are told to save" in job.said
    assert (found := re.search(r"stopped by SIGTERM after step (\d+) of 30", job.said))
    assert f"start_step {found[1]}" in job.said
    assert sorted(job.losses) == sorted(whole)
    assert [float(loss) for loss in job.losses.values()] == pytest.approx(
        [float(loss) for loss in whole.values()], 1e-4
    )


def test_a_plain_job_whose_rank_fails_ends_on_both_nodes(cluster, tmp_path):
    job = PlainJob(cluster, tmp_path / "fails", "--data-dir", str(tmp_path))
    began = time.monotonic()
    assert job.ends() == "FAILED"

    assert time.monotonic() - began < 60
    assert "has 0 bytes of *.txt" in job.said
