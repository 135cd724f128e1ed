"""Real torchrun, real gloo ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import SCRIPTS

import labkit
from labkit import LabError, LaunchError, RankFailedError, Script, ScriptError, words
from labkit.cli import main
from labkit.record import RunReader

TINY = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.head = nn.Linear(8, 256)

    def forward(self, tokens):
        return self.head(torch.relu(self.blocks[0](self.embed(tokens))))
"""


def tiny(name: str) -> Script:
    return Script.load(name).with_cells(model=TINY)


@pytest.mark.parametrize(("name", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_our_scripts_train_and_leave_a_true_record(name, ranks):
    run = labkit.launch(tiny(name), nproc_per_node=ranks, steps=12, global_batch_size=8, wait=False)
    state = run.wait(120)
    metrics = run.metrics()
    assert state.state == "succeeded"
    assert state.exit_code == 0
    assert sorted(metrics["rank"].unique()) == list(range(ranks))
    assert metrics.groupby("rank")["step"].max().eq(12).all()
    assert metrics["loss"].notna().sum() == 12 * ranks
    assert metrics.groupby("rank")["samples"].sum().eq(12 * 8 / ranks).all()
    assert metrics["test_accuracy"].nunique(dropna=True) == 1


def test_launch_returns_before_the_script_has_started_and_what_it_was_then_is_what_runs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('version 1')\n")
    started = time.monotonic()
    run = labkit.launch(script, nproc_per_node=1, wait=False)
    assert time.monotonic() - started < 2
    assert run.status().state in ("starting", "running")
    script.write_text("print('version 2')\n")
    run.wait(120)
    assert run.logs(rank=0, stream="stdout").strip() == "version 1"


@pytest.mark.soak  # lab 04 measures it
def test_a_rank_holds_half_of_the_state_under_fsdp():
    held = {}
    for name in ("ddp", "fsdp"):
        run = labkit.launch(tiny(name), nproc_per_node=2, steps=3, global_batch_size=8)
        summary = labkit.compare([run]).summaries[0]
        held[name] = summary["held_bytes"]
        assert summary["parameters"] == sum(p.numel() for p in _model().parameters())
    # Adam's step counters are one number per parameter on every rank, and are not sharded.
    assert held["fsdp"] == pytest.approx(held["ddp"] / 2, rel=0.01)


def _model():
    namespace: dict = {}
    exec(TINY, namespace)
    return namespace["Model"]()


def test_a_plain_ddp_loop_is_seen_without_a_line_of_ours():
    run = labkit.launch(SCRIPTS / "plain_ddp.py", nproc_per_node=2, args=["400"])
    metrics = run.metrics()
    last = metrics.groupby("rank").last()
    lines = [
        line.split() for line in run.logs(rank=1, stream="stdout").splitlines()
    ]  # torch 2.10 prints one of its own
    printed = {int(line[0]): float(line[1]) for line in lines if len(line) == 2}
    seen = metrics.query("rank == 1").dropna(subset=["loss"]).set_index("step")["loss"]
    assert metrics.groupby("rank")["steps"].sum().eq(400).all()
    assert last["step"].eq(400).all()
    assert metrics.groupby("rank")["samples"].sum().eq(400 * 16).all()
    assert len(seen) >= 2
    assert seen.to_dict() == {step: printed[step] for step in seen.index}
    phases = metrics[["input", "forward", "backward", "optimizer", "communication"]]
    assert (phases.sum() > 0).all()
    assert (phases.sum(axis=1).dropna() <= metrics["step_seconds"].dropna() * 1.01).all()
    assert (metrics["rss"] > 0).all()


LATE = """
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    model(torch.randn(4, 8))
    loss = model(torch.randn(4, 8)).square().mean()
    if dist.get_rank() == 1 and step % 10 == 5:
        time.sleep(0.2)
    loss.backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


def test_every_wait_for_a_late_rank_is_communication(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    first = labkit.launch(tmp_path / "late.py", nproc_per_node=2).metrics().query("rank == 0")

    assert 0.8 * 6 * 0.2 < (first["communication"] * first["steps"]).sum() < 1.3 * 6 * 0.2


@pytest.mark.parametrize(
    ("script", "steps", "says"),
    [
        ("with_accelerate.py", 20, "accelerate done on 2 processes"),
        ("with_lightning.py", 20, "lightning done after 20 steps"),
    ],
)
def test_frameworks_on_torch_are_seen_unchanged(script, steps, says):
    run = labkit.launch(SCRIPTS / script, nproc_per_node=2)
    metrics = run.metrics()
    assert says in run.logs(rank=0)
    assert metrics.groupby("rank")["steps"].sum().eq(steps).all()
    assert metrics.groupby("rank")["samples"].sum().eq(steps * 16).all()
    assert metrics["loss"].notna().any()


def test_a_group_that_is_freed_right_after_a_backward_pass_does_not_hang_its_rank():
    run = labkit.launch(SCRIPTS / "ending.py", nproc_per_node=2, watchdog=30, wait=False)

    assert run.wait().state == "succeeded"


def test_the_command_reproduces_the_run_without_labkit(tmp_path):
    run = labkit.launch(tiny("ddp"), nproc_per_node=2, steps=5, global_batch_size=8, precision="fp64")
    done = subprocess.run(["bash", "-c", run.command], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    ours = run.metrics().query("rank == 0 and step == 5")["loss"].iloc[0]
    theirs = next(line.split()[-1] for line in done.stdout.splitlines() if line.startswith("step 5  epoch"))
    assert float(theirs) == pytest.approx(ours, rel=1e-5)
    assert "labkit" not in Path(run.folder.script).read_text().lower()


def test_a_module_beside_the_script_is_found_and_one_named_like_pythons_own_counts_as_under_torchrun(tmp_path):
    (tmp_path / "helper.py").write_text("WORD = 'found'\n")
    (tmp_path / "train.py").write_text("import helper, torch\nprint(helper.WORD, __name__, __file__)\n")
    run = labkit.launch(tmp_path / "train.py", nproc_per_node=1)
    assert run.logs(rank=0, stream="stdout").strip() == f"found __main__ {tmp_path / 'train.py'}"
    (tmp_path / "random.py").write_text("raise RuntimeError('hid the real one')\n")
    with pytest.raises(labkit.RankFailedError, match="hid the real one"):
        labkit.launch(tmp_path / "train.py", nproc_per_node=1)


def test_a_script_in_another_encoding_runs_as_under_python_and_its_lines_are_its_own(tmp_path):
    """Latin-1 with Windows' line ends, a form feed and a line separator before the line that fails."""
    source = (
        "#!/usr/bin/env python\r\n# -*- coding: latin-1 -*-\r\n\x0c\r\nimport torch\r\n"
        "print('caf\xe9', len('\xe9'), 'a\x1cb'.split())\r\n\x0c\r\nraise ValueError('na\xefve')  # \xe9\r\n"
    ).encode("latin-1")
    script = tmp_path / "train.py"
    script.write_bytes(source)
    plain = subprocess.run([sys.executable, "-X", "utf8", script], capture_output=True, check=False)

    with pytest.raises(RankFailedError) as failed:
        labkit.launch(script, nproc_per_node=1, wait=True)

    run = labkit.attach()
    assert run.logs(rank=0, stream="stdout") == plain.stdout.decode()
    assert run.folder.script.read_bytes() == source
    assert run.script.encoded() == source
    assert "rank 0 failed: ValueError: naïve (train.py line 7)" in str(failed.value)
    assert "raise ValueError('naïve')  # é" in str(failed.value)
    assert failed.value.line == 7
    assert "naïve" in run.report().read_text(encoding="utf-8")


def test_logs_are_those_of_both_streams_each_in_its_order(tmp_path, capfd):
    (tmp_path / "train.py").write_text(
        "import os, sys, time\n"
        "for number in (1, 2):\n"
        "    print('out', number, flush=True)\n"
        "    if os.environ['RANK'] == '1':\n"
        "        print('err', number, file=sys.stderr, flush=True)\n"
    )
    run = labkit.launch(tmp_path / "train.py", nproc_per_node=2, wait=True)

    assert run.logs(rank=0) == "out 1\nout 2\n"
    assert run.logs(rank=1) == "out 1\nout 2\n== rank 1, stderr ==\nerr 1\nerr 2\n"
    assert run.logs(rank=1, stream="stdout") == "out 1\nout 2\n"
    assert run.logs() == f"== rank 0 ==\n{run.logs(rank=0)}\n== rank 1 ==\n{run.logs(rank=1)}"
    capfd.readouterr()
    for arguments, shown in (
        ([], run.logs()),
        (["--stdout"], run.logs(stream="stdout")),
        (["--stderr"], run.logs(stream="stderr")),
    ):
        main(["logs", run.id, *arguments])
        assert capfd.readouterr().out == shown


def test_a_script_in_a_folder_with_spaces_and_quotes_runs(tmp_path):
    folder = tmp_path / "it's $(a) folder"
    folder.mkdir()
    (folder / "train it.py").write_text("import sys\nprint(sys.argv[1:])\n")
    arguments = ["a b", "$HOME", "'", "--log", "x"]  # --log: torchrun has --log-dir and --logs-specs
    run = labkit.launch(folder / "train it.py", nproc_per_node=1, args=arguments)
    assert run.logs(rank=0, stream="stdout").strip() == str(arguments)
    assert shlex.split(run.command)[-5:] == arguments


def test_time_between_a_step_and_the_next_batch_is_part_of_the_step(tmp_path):
    loop = (SCRIPTS / "plain_ddp.py").read_text()
    assert "        step += 1\n" in loop
    slow = tmp_path / "slow.py"
    slow.write_text(loop.replace("        step += 1\n", "        step += 1\n        __import__('time').sleep(0.05)\n"))
    metrics = labkit.launch(slow, nproc_per_node=2, args=["40"]).metrics()
    rank = metrics.query("rank == 0")
    assert rank["step_seconds"].iloc[1:].median() >= 0.05


@pytest.mark.soak  # tests/faults resumes in every run of its own
def test_checkpoints_go_into_the_run_folder_and_a_later_run_resumes_from_the_newest():
    first = labkit.launch(tiny("ddp"), nproc_per_node=2, steps=6, save_every=2, global_batch_size=8, precision="fp64")
    kept = sorted(path.name for path in first.folder.checkpoints.iterdir())
    assert kept == ["step-4", "step-6"]
    assert first.status().checkpoint == "step-6"
    commit = json.loads((first.folder.checkpoints / "step-6" / "COMMIT.json").read_text())
    assert commit["step"] == 6

    folder = str(first.folder.checkpoints)
    resumed = labkit.launch(
        tiny("fsdp"), nproc_per_node=2, steps=10, checkpoint_dir=folder, global_batch_size=8, precision="fp64"
    )
    whole = labkit.launch(tiny("ddp"), nproc_per_node=2, steps=10, global_batch_size=8, precision="fp64")
    assert resumed.metrics()["step"].min() == 7
    assert resumed.metrics().groupby("rank")["steps"].sum().eq(4).all()
    assert "step 10 of 10" in repr(resumed)
    reported = resumed.metrics().dropna(subset=["loss"]).set_index(["rank", "step"])["loss"]
    expected = whole.metrics().dropna(subset=["loss"]).set_index(["rank", "step"])["loss"]
    for rank in (0, 1):
        assert reported[rank, 10] == pytest.approx(expected[rank, 10], rel=1e-9)


def test_the_loss_is_computed_in_full_precision_under_bf16():
    run = labkit.launch(tiny("fsdp"), nproc_per_node=2, steps=5, global_batch_size=8, precision="bf16")
    losses = run.metrics()["loss"].dropna()
    representable = [float(torch.tensor(loss).bfloat16()) == loss for loss in losses]
    assert not all(representable)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"script": "fdsp"}, ScriptError, "did you mean 'fsdp'"),
        ({"script": "missing.py"}, ScriptError, "script not found"),
        ({"nproc_per_node": 0}, LaunchError, "at least 1, got 0"),
        ({"nproc_per_node": -1}, LaunchError, "at least 1, got -1"),
        ({"nproc_per_node": "two"}, LaunchError, "got 'two'"),
        ({"nproc_per_node": 2, "backend": "nccl"}, LaunchError, "needs a GPU"),
        ({"stepz": 3}, ScriptError, "did you mean 'steps'? It takes: epochs, steps"),
        ({"args": ["--stepz", "3"]}, ScriptError, "takes no parameter 'stepz'"),
        ({"precision": "fp8"}, ScriptError, "must be one of fp32, fp16, bf16, fp64"),
        ({"steps": "many"}, ScriptError, "must be an integer"),
        ({"nproc_per_node": 3, "global_batch_size": 64}, LaunchError, "63 or 66"),
        ({"args": "--steps 3"}, LaunchError, "args must be a list"),
        ({"args": ["x" * 200_000]}, LaunchError, "cannot be passed to a process"),
        ({"env": {"A=B": "1"}}, LaunchError, "not a valid environment variable name"),
        ({"env": {"A": "1\0"}}, LaunchError, "no NUL byte"),
        ({"nprocs": 2}, ScriptError, "did you mean 'nproc_per_node'"),
        ({"script": 3}, ScriptError, "got 3"),
        ({"args": ["--global-batch-size=33"]}, LaunchError, "32 or 34"),
        ({"runs_dir": "/proc/nowhere"}, LabError, "runs cannot be stored in /proc/nowhere"),
    ],
)
def test_bad_input_is_refused_before_anything_exists(arguments, error, says, runs_dir):
    with pytest.raises(error) as raised:
        labkit.launch(arguments.pop("script", "ddp"), **arguments)
    assert says in str(raised.value)
    assert not runs_dir.exists() or not list(runs_dir.iterdir())


def test_a_syntax_error_in_a_script_is_refused_before_anything_exists(tmp_path, runs_dir):
    (tmp_path / "train.py").write_text("x = 1\ndef f(:\n    pass\n")
    with pytest.raises(ScriptError, match="line 2"):
        labkit.launch(tmp_path / "train.py")
    assert not runs_dir.exists()


def test_a_missing_package_of_our_own_scripts_is_named_before_anything_exists(runs_dir):
    with pytest.raises(LaunchError, match="imports no_such_package"):
        labkit.launch(tiny("ddp").with_cells(model=f"import no_such_package\n{TINY}"))
    assert not runs_dir.exists()


def test_a_users_own_script_is_never_refused_for_what_it_imports(tmp_path, capsys):
    """What it changes before an import, only Python knows; a package that is surely missing is said at the launch."""
    (tmp_path / "lib" / "inner").mkdir(parents=True)
    (tmp_path / "lib" / "mylib.py").write_text("X = 2\n")
    (tmp_path / "lib" / "strain.py").write_text("import mylib\nprint('ok', mylib.X)\n")
    (tmp_path / "link.py").symlink_to("lib/strain.py")
    (tmp_path / "appends.py").write_text(
        "import os, sys\nsys.path.append(os.path.join(os.path.dirname(__file__), 'lib'))\n"
        "import mylib\nprint('ok', mylib.X)\n"
    )
    (tmp_path / "lacks.py").write_text("import sys\nimport no_such_package\n")

    for name in ("link.py", "appends.py"):
        assert labkit.launch(tmp_path / name, nproc_per_node=1, wait=True).logs(rank=0, stream="stdout") == "ok 2\n"
        assert capsys.readouterr().err == ""
    with pytest.raises(RankFailedError, match="ModuleNotFoundError: No module named 'no_such_package'"):
        labkit.launch(tmp_path / "lacks.py", nproc_per_node=1, wait=True)
    assert f"lacks.py:2: imports no_such_package, which {sys.executable} does not find" in capsys.readouterr().err


def test_leftovers_of_another_launcher_do_not_change_the_world_size(monkeypatch):
    for name, value in {"PET_NPROC_PER_NODE": "3", "WORLD_SIZE": "7", "RANK": "5", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    run = labkit.launch(SCRIPTS / "faulty.py", nproc_per_node=2, steps=2)
    assert run.folder.started_ranks() == [0, 1]
    assert [*run.folder.read_manifest().env_dropped] == ["MASTER_PORT", "PET_NPROC_PER_NODE", "RANK", "WORLD_SIZE"]


def test_a_run_is_found_again_by_any_part_of_its_id():
    run = labkit.launch(SCRIPTS / "faulty.py", nproc_per_node=1, steps=1, name="my first run!")
    assert "my-first-run" in run.id
    for which in ("latest", run.id, run.id[-4:], str(run.path)):
        assert labkit.attach(which).id == run.id
    assert [r.id for r in labkit.runs()] == [run.id]
    with pytest.raises(LabError, match="no run matches"):
        labkit.attach("nothing like it")


def test_what_a_loop_does_is_recorded_though_it_reports_nothing(monkeypatch):
    monkeypatch.setenv("LABKIT_WARM", "0")  # a forked rank has imported torch already
    run = labkit.launch(SCRIPTS / "phases.py", nproc_per_node=1, wait=False)
    seen = []
    while not (state := run.status()).is_final:
        said = words.progress(RunReader(run.folder).read_all(), state)
        if said not in seen:
            seen.append(said)
        time.sleep(0.1)

    assert seen[0] == "starting the ranks"
    between = {f"step {n}" for n in range(1, 5)}  # whichever of the quick steps a look happened to meet
    assert any(s.startswith("preparing: importing torch") for s in seen)
    assert [s for s in seen[1:] if s not in between and not s.startswith("preparing: ")] == [
        "in the first step",
        "step 4, evaluating",
    ]
    assert words.progress(RunReader(run.folder).read_all(), state) == "step 4"


def test_modules_that_only_the_ranks_will_see_are_not_said_to_be_missing(tmp_path: Path, capsys):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "only_for_ranks.py").write_text("VALUE = 7\n")
    script = tmp_path / "mine.py"
    script.write_text("import only_for_ranks\n\nprint('value', only_for_ranks.VALUE)\n")

    path = os.pathsep.join(filter(None, [str(tmp_path / "elsewhere"), os.environ.get("PYTHONPATH")]))
    run = labkit.launch(script, env={"PYTHONPATH": path}, wait=True)

    assert "value 7" in run.logs(rank=0)
    assert capsys.readouterr().err == ""


def test_in_a_deleted_folder_nothing_is_launched_or_listed(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("LABKIT_RUNS", raising=False)
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    for verb in (lambda: labkit.launch("ddp"), lambda: labkit.launch("ddp", runs_dir=tmp_path / "runs"), labkit.runs):
        with pytest.raises(LabError, match="the current folder was deleted; change to another"):
            verb()
    assert not (tmp_path / "runs").exists() or not [*(tmp_path / "runs").iterdir()]


def test_a_folder_in_place_of_the_state_is_a_lost_run_in_every_verb(tmp_path: Path):
    run = labkit.launch(tiny("single"), nproc_per_node=1, steps=1, global_batch_size=4, wait=True)
    run.folder.state.unlink()
    (run.folder.state / "inner").mkdir(parents=True)

    run = labkit.attach(run.path)

    assert run.status().state == "lost"
    assert "state.json is missing or damaged" in repr(run)
    assert "lost" in repr(labkit.runs())
    assert "lost" in str(labkit.compare([run]))
    assert run.stop().state == "lost"


def test_a_launch_that_was_killed_is_listed_as_lost_and_its_folder_deleted_on_request(tmp_path: Path):
    kill = "import os, labkit.launcher.prepare as prepare\n"
    kill += "prepare._manifest = lambda *_: os.kill(os.getpid(), 9)\n"
    runs = tmp_path / "runs"
    launch = f"{kill}import labkit\nlabkit.launch('ddp', runs_dir={str(runs)!r})\n"
    assert subprocess.run([sys.executable, "-c", launch]).returncode == -signal.SIGKILL
    (left,) = runs.iterdir()
    (runs / "my own folder").mkdir()
    verb = [sys.executable, "-m", "labkit.cli", "--runs-dir", str(runs), "runs"]

    assert "no runs yet" in subprocess.run(verb, capture_output=True, text=True).stdout  # it may still be launching
    os.utime(left, (time.time() - 90, time.time() - 90))
    listed = subprocess.run(verb, capture_output=True, text=True).stdout
    cleaned = subprocess.run([*verb, "--clean"], capture_output=True, text=True).stdout

    assert re.search(rf"^{left.name} +lost +its launch was killed before the run started", listed, re.MULTILINE)
    assert cleaned == f"deleted {left}\nno runs yet\n"
    assert [path.name for path in runs.iterdir()] == ["my own folder"]
