"""The launch file and the run on a real Slurm of two nodes, made and taken down here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.slurm_cluster import Cluster, why_not
from conftest import SCRIPTS as FAULTS

import labkit
from labkit.cluster import slurm
from labkit.cluster.sbatch import JobOptions, LaunchFile, sbatch_text
from labkit.record.table import rows

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=f"a Slurm cluster {why_not()}"), pytest.mark.timeout(300)]

SCRIPT = labkit.Script.load("ddp", "checkpoints")
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
    monkeypatch.setattr(slurm, "_answers", {})  # each cluster counts its jobs from 1
    yield
    subprocess.run(["scancel", "--user=root"], check=True, env=cluster.environment)
    wait_until(lambda: not cluster.jobs(), 30, "a job is left")
    wait_until(lambda: not cluster.processes(), 10, f"left on the nodes: {cluster.processes()}")


@pytest.fixture
def text_files(tmp_path: Path) -> Path:
    """So little to train on that a test's evaluation takes a second."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_bytes(str(SCRIPT).encode()[:20_000])
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
        program = [str(SCRIPT.write(folder / "train.py")), "--checkpoint-dir", str(self.checkpoints), *args]
        job = JobOptions(
            time=time,
            nodes=2,
            nproc_per_node=1,
            cpus_per_task=1,
            saving_seconds=SAVING_SECONDS,
            setup="srun true",  # a step of its own: the ranks' is not always the first
        )
        file.write_text(
            sbatch_text(
                LaunchFile(
                    job,
                    name=name,
                    cwd=str(folder),
                    output=str(self.output),
                    python=sys.executable,
                    program=program,
                    checkpoints=str(self.checkpoints),
                )
            )
        )
        done = subprocess.run(["sbatch", "--parsable", file], capture_output=True, text=True, cwd="/")
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()

    @property
    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    @property
    def losses(self) -> dict[int, float]:
        return {int(step): float(loss) for step, loss in LOSS.findall(self.said)}

    def state(self) -> str:
        return self.cluster.jobs("all").get(self.id, "")

    def ends(self, seconds: float = 60) -> str:
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        return wait_until(lambda: (state := self.state()) in over and state, seconds, lambda: self.said[-3000:])


@pytest.mark.soak
def test_a_plain_job_saves_near_its_time_limit_and_resumes_from_there(cluster, tmp_path, text_files):
    options = ["--data-dir", str(text_files), "--global-batch-size", "4", "--steps", "8"]
    job = PlainJob(cluster, tmp_path / "whole", *options)
    whole = job.ends() and job.losses

    job = PlainJob(cluster, tmp_path / "odd 'name' $HOME %j é", *options, name="odd 'name' $HOME é")
    wait_until(lambda: 3 in job.losses, 60, lambda: job.said)
    # what Slurm does when the time is nearly up; it looks every 30 s, which a test need not wait for
    subprocess.run(["scancel", "--batch", "--signal=USR1", job.id], check=True)
    assert job.ends(90) == "COMPLETED"

    assert "the time limit is near: asking the ranks to save" in job.said
    assert (found := re.search(r"stopped by SIGTERM after step (\d+) of 8", job.said))
    assert f"start_step {found[1]}" in job.said
    assert job.losses == pytest.approx(whole, rel=1e-4)


@pytest.mark.soak
def test_a_plain_job_whose_rank_fails_ends_on_both_nodes(cluster, tmp_path):
    job = PlainJob(cluster, tmp_path / "fails", "--data-dir", str(tmp_path))
    began = time.monotonic()
    assert job.ends() == "FAILED"

    assert time.monotonic() - began < 60
    assert "has 0 bytes of *.txt" in job.said


def submit(script="ddp", **options) -> labkit.Run:
    given = {"nodes": 2, "nproc_per_node": 1, "time": "00:10:00", "saving_seconds": SAVING_SECONDS, "cpus_per_task": 1}
    return labkit.submit(script, **{**given, **options})


def small(data: Path, **options) -> dict:
    """Options of labkit's own scripts for steps of some tenths of a second."""
    return {"data_dir": data, "global_batch_size": 4} | options


def job_id(run: labkit.Run) -> str:
    return json.loads(run.folder.job.read_text())["job"]


def job_state(cluster: Cluster, run: labkit.Run) -> str:
    return cluster.jobs("all").get(job_id(run), "")


def step_of(run: labkit.Run) -> int:
    return min(max((r["step"] for r in rows(run.folder) if r["rank"] == rank), default=0) for rank in (0, 1))


def wait_for_step(run: labkit.Run, step: int) -> None:
    wait_until(lambda: step_of(run) >= step or run.status().is_final, 120, lambda: run.status())
    assert not run.status().is_final, run.status()


def losses_of(run: labkit.Run) -> dict[int, float]:
    """Of rank 0; of a step that was made twice, the last."""
    return {r["step"]: r["loss"] for r in rows(run.folder) if r["rank"] == 0 and "loss" in r}


def causes(run: labkit.Run) -> list:
    """What each node has written down as the cause."""
    return [json.loads(run.folder.latest.node(node).state.read_text())["cause"] for node in (0, 1)]


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_run_waits_in_the_queue_trains_on_both_nodes_and_succeeds(cluster, text_files):
    blocking = ["sbatch", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600"]
    blocker = subprocess.run([*blocking, "--parsable"], capture_output=True, text=True, check=True).stdout.strip()
    run = submit(nproc_per_node=2, **small(text_files, steps=60))

    waits = f"job {job_id(run)} is waiting in Slurm's queue for nodes to become free"
    wait_until(lambda: (run.status().notice or "").startswith(waits), 20, lambda: run.status())
    assert run.status().state == "starting"
    assert waits in repr(run)
    subprocess.run(["scancel", blocker], check=True)

    wait_for_step(run, 2)
    seen = python(f"import labkit; run = labkit.attach({str(run.path)!r}); print(run.status().state, run.stacks())")
    assert seen.startswith("running ")
    assert "rank 3" in seen
    state = run.wait(timeout=120)
    assert (state.state, state.exit_code) == ("succeeded", 0)
    wait_until(lambda: job_state(cluster, run) == "COMPLETED", 20)
    assert sorted(p.stem for p in run.folder.hosts.glob("*.jsonl")) == ["nodeA", "nodeB"]
    assert sorted(run.metrics()["rank"].unique()) == [0, 1, 2, 3]


def test_a_rank_that_fails_is_the_cause_on_both_nodes_and_the_job_failed(cluster):
    run = submit(FAULTS / "faulty.py", fault="raise")

    with pytest.raises(labkit.RankFailedError, match="rank 1 on nodeB failed: ValueError: boom"):
        run.wait(timeout=60)
    first, second = causes(run)
    assert first == second
    assert first["line"]
    wait_until(lambda: job_state(cluster, run) == "FAILED", 30)


def test_a_run_that_is_asked_paused_and_stopped_leaves_no_job(cluster, capsys):
    run = submit(FAULTS / "faulty.py", steps=100_000)
    wait_for_step(run, 3)
    asked = run.ask("dist.get_rank()")
    assert [*asked["dist.get_rank()"]] == [0, 1]
    assert asked["step"].nunique() == 1
    step = run.pause()
    assert run.until("dist.get_rank() == 1") == step + 1

    assert run.stop().state == "stopped"
    assert run.status().cause["sentence"] == "stopped on request"
    assert causes(run) == [{"kind": "stopped", "sentence": "stopped on request"}] * 2
    assert job_id(run) not in cluster.jobs()
    assert f"; job {job_id(run)} has ended" in capsys.readouterr().out


def test_a_run_is_stopped_while_it_waits(cluster):
    run = submit(FAULTS / "faulty.py", options=["--begin=now+1hour"])
    wait_until(lambda: job_state(cluster, run) == "PENDING", 10)

    assert run.stop().state == "stopped"
    assert job_state(cluster, run) == "CANCELLED"
    assert labkit.attach(run.path).status().cause["sentence"] == "stopped on request"


def test_a_job_that_is_cancelled_is_a_run_that_was_stopped(cluster):
    run = submit(FAULTS / "faulty.py", steps=100_000)
    wait_for_step(run, 3)
    subprocess.run(["scancel", job_id(run)], check=True)

    assert run.wait(timeout=60).state == "stopped"
    assert run.status().cause["sentence"] == f"job {job_id(run)} was cancelled (scancel)"


def test_a_run_near_its_time_limit_saves_and_resumes(cluster, text_files):
    whole = submit(**small(text_files, steps=25))
    whole.wait(timeout=120)

    run = submit(**small(text_files, steps=25))
    wait_for_step(run, 3)
    # what Slurm does when the time is nearly up; it looks every 30 s, which a test need not wait for
    subprocess.run(["scancel", "--batch", "--signal=USR1", job_id(run)], check=True)
    assert_goes_on(cluster, run, losses_of(whole))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_run_at_its_real_time_limit_saves_and_resumes(cluster, text_files):
    whole = submit(**small(text_files, steps=250))
    whole.wait(timeout=300)

    run = submit(**small(text_files, steps=250), time="00:01:00")
    assert_goes_on(cluster, run, losses_of(whole))


def assert_goes_on(cluster: Cluster, run: labkit.Run, whole: dict[int, float]) -> None:
    seen = set()

    def over() -> bool:
        seen.add((state := run.status()).attempt)
        return state.is_final

    wait_until(over, 240, lambda: f"{run.status()}\n{run.folder.job_output.read_text()}")
    state = run.status()
    assert state.state == "succeeded", state
    assert state.attempt >= 2
    assert seen >= {1, 2}
    first = state.earlier[0]
    assert first["cause"]["sentence"] == "saved and stopped near the job's time limit"
    assert first["checkpoint"]
    resumed = int(first["checkpoint"].removeprefix("step-"))
    assert min(r["step"] for r in rows(run.folder) if r["attempt"] == 2 and "loss" in r) == resumed + 1
    losses = losses_of(run)  # not of every step, when steps are fast
    both = sorted(losses.keys() & whole.keys())
    assert len(both) >= 20
    assert [losses[step] for step in both] == pytest.approx([whole[step] for step in both], rel=1e-4)
    wait_until(lambda: job_state(cluster, run) == "COMPLETED", 30)


@pytest.mark.soak
def test_a_job_that_slurm_ended_because_its_time_was_over_says_so(cluster):
    run = submit(FAULTS / "faulty.py", steps=100_000, time="00:01:00")
    with pytest.raises(labkit.RankFailedError, match="it reached its time limit"):
        run.wait(timeout=200)


@pytest.mark.soak
def test_a_node_that_is_gone_for_good_is_named(monkeypatch):
    with Cluster() as another:  # of which one node is left
        monkeypatch.setenv("SLURM_CONF", str(another.conf))
        run = submit(FAULTS / "faulty.py", steps=100_000)
        wait_for_step(run, 3)
        another.kill("nodeB")

        with pytest.raises(labkit.RankFailedError, match="host nodeB was lost at"):
            run.wait(timeout=40)


def test_a_failure_before_the_ranks_start_is_reported_with_its_own_message(cluster):
    run = submit(FAULTS / "faulty.py", setup="echo no such module: cuda/99; exit 3")

    with pytest.raises(labkit.RankFailedError, match="failed with code 3; its last line: no such module: cuda/99"):
        run.wait(timeout=60)


def test_a_node_that_does_not_see_the_run_folder_says_so(cluster, runs_dir):
    runs_dir.mkdir()
    with cluster.hidden("nodeB", runs_dir):
        run = submit(FAULTS / "faulty.py")
        with pytest.raises(labkit.RankFailedError, match=r"job \d+ failed: host nodeB cannot see"):
            run.wait(timeout=50)


def test_nodes_that_do_not_see_the_scripts_folder_run_the_copy_in_the_runs(cluster, tmp_path, monkeypatch):
    project = tmp_path / "login" / "project"
    project.mkdir(parents=True)
    (project / "beside.py").write_text("from pathlib import Path\nSAID = Path('said.txt').read_text()\n")
    (project / "said.txt").write_text("of the login node")
    (project / "train.py").write_text("import torch\nfrom beside import SAID\nprint(SAID, flush=True)\n")
    monkeypatch.chdir(project)
    with cluster.hidden("nodeA", project.parent), cluster.hidden("nodeB", project.parent):
        run = submit("train.py")
        run.wait(timeout=60)

    assert [run.folder.log(rank).read_text() for rank in (0, 1)] == ["of the login node\n"] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "nope"}, "sbatch rejected the job: invalid partition specified: nope"),
        ({"time": "soon"}, "is not a Slurm time limit"),
        ({"time": "00:00:20", "script": "ddp"}, "is too short to save"),
        ({"gpus_per_node": 2}, r"Invalid generic resource \(gres\) specification"),
        ({"nodes": 0}, "nodes must be an integer, at least 1, got 0"),
        ({"nproc_per_node": "auto"}, "Slurm reports no GPUs"),
        ({"options": ["qos=high"]}, "is not an sbatch option"),
        ({"retries": 2}, "leave retries out"),
        ({"wait": True}, "wait is an option of launch"),
        ({"to": "kubernetes"}, "docs/examples"),
    ],
)
def test_what_cannot_be_submitted_is_refused_and_leaves_no_run(options, words):
    with pytest.raises(labkit.LaunchError, match=words):
        submit(**{"script": FAULTS / "faulty.py", **options})

    assert not labkit.runs()


def test_the_file_that_is_printed_can_be_submitted_by_hand(cluster, tmp_path):
    options = ["--nodes", "2", "--nproc-per-node", "1", "--time", "5"]
    command = [sys.executable, "-m", "labkit.cli", "slurm", "print", str(FAULTS / "faulty.py")]
    printed = subprocess.run(
        [*command, *options, "--", "--steps", "5"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    run = labkit.attach("latest")
    assert printed.stdout == run.folder.launch_file.read_text()
    assert f"labkit attach {run.id}" in printed.stderr
    assert run.status().state == "starting"

    subprocess.run(["sbatch", run.folder.launch_file], check=True, capture_output=True)
    assert run.wait(timeout=60).state == "succeeded"
    assert run.folder.job.exists()


def test_a_sweep_is_an_array_whose_points_run_once_each_and_are_stopped_and_resumed(cluster, tmp_path, monkeypatch):
    """Four points, two at a time, of which one fails; the sweep is stopped after the first two, then resumed twice."""
    ran = tmp_path / "ran.jsonl"
    points = [{"lr": 0.5}, {"lr": -1.0}, {"lr": 0.25, "seconds": 40.0}, {"lr": 0.125}]
    sweep = labkit.sweep(
        FAULTS / "swept.py", points=points, ran=str(ran), metric="test_loss", runs_dir=tmp_path / "runs",
        to="slurm", time="00:05:00", cpus_per_task=1, at_once=2, wait=False,
    )  # fmt: skip
    states = lambda: [result.state for result in sweep.results()]  # noqa: E731
    wait_until(lambda: states()[:3] == ["succeeded", "failed", "running"] and states()[3] == "succeeded", 90, states)
    assert len({job.partition("_")[0] for job in cluster.jobs()}) == 1  # one array
    sweep.stop()
    assert sweep.status().state == "failed"
    assert states() == ["succeeded", "failed", "stopped", "succeeded"]
    assert not cluster.jobs()

    manifest = json.loads(sweep.folder.manifest.read_text())
    manifest["points"][2]["seconds"] = 0.2
    sweep.folder.manifest.write_text(json.dumps(manifest))
    again = labkit.Sweep.attach(sweep.path)
    again.resume(wait=True)
    assert [result.state for result in again.results()] == ["succeeded", "failed", "succeeded", "succeeded"]
    assert again.status().sentence == "3 of 4 points succeeded, 1 failed"
    assert again.best().point == 3
    again.resume(wait=True)  # nothing is missing
    lines = [json.loads(line) for line in ran.read_text().splitlines()]
    assert sorted(line["lr"] for line in lines) == [0.125, 0.25, 0.5]
    assert len([*(tmp_path / "runs").glob("2*")]) == 5
