"""Every verb with --json for real, compared field by field with docs/reference/json.md; and every exit code there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml
from json_page import PAGE, problems

import labkit

IN_CI = (PAGE.parents[1] / "how_to" / "check_in_ci.md").read_text(encoding="utf-8")
TRAINS = """
import logging, sys, time
import torch, torch.distributed as dist
from torch import nn
steps, seconds = int(sys.argv[1]), float(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = nn.parallel.DistributedDataParallel(nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, steps + 1):
    time.sleep(seconds)
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if "apart" in sys.argv and dist.get_rank() == 1:
        model.module.weight.data += 0.01
    if "fails" in sys.argv and step == 5 and dist.get_rank() == 1:
        raise ValueError("boom \\x1b[31m")
    if step % 10 == 0:
        logging.getLogger("metrics").info({"val_loss": 1 / step, "step": step})
dist.destroy_process_group()
"""


def labkit_says(*words, code=0, **options):
    """stdout of a verb in a terminal, where it exits with that code."""
    command = [sys.executable, "-m", "labkit.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def agrees(schema, *words, code=0):
    """The document that a verb prints, which is as the page says."""
    text = labkit_says(*words, "--json", code=code)
    assert problems(text, schema) == []
    return json.loads(text)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAINS)
    return path


def test_each_verb_prints_what_the_page_says(script, tmp_path):
    running = labkit.launch(script, nproc_per_node=2, args=["2000", "0.05"], name="long", wait=False)
    failed = labkit.launch(script, nproc_per_node=2, args=["20", "0", "fails"], wait=False)
    with pytest.raises(labkit.RankFailedError):
        failed.wait()
    deadline = time.monotonic() + 60
    while running.to_dict()["step"] < 5:
        assert time.monotonic() < deadline
        time.sleep(0.2)

    asked = agrees("labkit.ask/1", "ask", running.id, "loss.item(), [loss != loss], model.training")
    assert [answer["rank"] for answer in asked["answers"]] == [0, 1]
    assert [*asked["answers"][0]["values"]] == ["loss.item()", "[loss != loss]", "model.training"]
    stacks = agrees("labkit.stacks/1", "stacks", running.id)
    assert {frame["file"] for rank in stacks["ranks"] for frame in rank["frames"]} >= {str(script)}
    running.stop()
    assert labkit_says("stacks", running.id, "--json", code=2) == ""  # what is refused is no document

    listed = agrees("labkit.run/1", "runs")
    assert [each["state"] for each in listed] == ["failed", "stopped"]
    assert listed == [run.to_dict() for run in (failed, running)] == labkit.runs().facts()
    report = agrees("labkit.report/1", "report", failed.id)
    assert report["run"] == listed[0] and report["path"] == str(failed.folder.report)
    assert report["run"]["cause"]["rank"] == 1 and any("boom" in line for line in report["why"]["traceback"])
    assert agrees("labkit.report/1", "report", running.id)["phases"]["backward"] > 0
    assert agrees("labkit.findings/1", "findings", failed.id)["beside"]
    compared = agrees("labkit.compare/1", "compare", failed.id, running.id)
    assert [each["state"] for each in compared["runs"]] == ["failed", "stopped"] and compared["passed"] is None

    assert agrees("labkit.doctor/1", "doctor", code=0 if labkit.doctor().can_train else 1)["findings"]
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n")
    assert agrees("labkit.check/1", "check", wrong, code=1)
    assert agrees("labkit.migration/1", "check", "--from", "ddp", "fsdp")["changed"]


def test_a_plan_is_printed_as_the_page_says(script):
    plan = agrees("labkit.plan/1", "plan", "fsdp", "--nproc-per-node", 2, "--device", "2xT4")
    assert plan["fits"] and plan["strategies"][0]["peak_bytes"] == plan["peak"]["bytes"]
    assert [each["strategy"] for each in plan["strategies"] if each["recommended"]]
    assert plan["step_seconds"]["low"] <= plan["step_seconds"]["expected"] <= plan["step_seconds"]["high"]
    own = labkit_says("plan", script, "--nproc-per-node", 2, "--json", "--", "3", "0")
    assert problems(own, "labkit.plan/1") == [] and json.loads(own)["fits"]


def codes():
    return {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.M)}


def test_each_exit_code_of_the_page_is_what_it_says(script, tmp_path):
    seen = set()

    def exits(code, *words):
        seen.add(code)
        return labkit_says(*words, code=code)

    def launch(name, *arguments, code=0):
        exits(code, "launch", script, "--nproc-per-node", 2, "--name", name, *options, "--", *arguments)

    options = ()
    launch("bad", "40", "0.02", "fails", code=1)
    options = ("--stop-if", "step > 20")
    launch("stopped", "4000", "0.02", code=4)
    options = ("--strict",)
    launch("apart", "30", "0.02", "apart", code=3)
    exits(1, "findings", "apart")
    exits(2, "attach", "nothing")

    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "labkit.cli"]
    assert subprocess.run([*command, "runs"], stdout=write, stderr=subprocess.DEVNULL).returncode == 141
    os.close(write)
    following = subprocess.Popen([*command, "launch", str(script), "--", "1000", "0.1"], stdout=subprocess.PIPE)
    assert b"started" in following.stdout.readline()
    time.sleep(1)
    following.send_signal(signal.SIGINT)
    following.communicate()
    assert following.returncode == 130
    # those of a gate are below, and the end of a terminal is in tests/faults/test_terminal.py
    assert seen | {141, 130} | {0, 5, 6} | {129} == codes()


def test_the_steps_on_github_train_both_commits_and_compare_them(tmp_path, monkeypatch):
    folder = tmp_path / "new"
    folder.mkdir()
    script = TRAINS.replace("int(sys.argv[1]), float(sys.argv[2])", "120, 0.025")
    (folder / "train.py").write_text(script)
    monkeypatch.chdir(folder)
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", *words.split()], check=True)
    subprocess.run(["git", "update-ref", "refs/remotes/origin/main", "HEAD"], check=True)

    steps = yaml.safe_load(re.findall(r"```yaml\n(- uses: actions/checkout@v5\n.*?)```", IN_CI, re.S)[-1])
    *before, gate = [step["run"] for step in steps if "run" in step]
    for command in before:
        subprocess.run(["bash", "-ec", command], check=True, capture_output=True, timeout=120)
    done = subprocess.run(["bash", "-ec", gate], capture_output=True, text=True)
    assert done.returncode in (0, 6), done.stdout + done.stderr  # 6 where the machine is busy
    assert "passed: val_loss > 0.01: 0.008333 -> 0.008333, +0 ± 0 (2 and 2 runs)" in done.stdout

    pair = ("compare", "old-1", "new-1")
    assert "FAILED: val_loss > -0.01" in labkit_says(
        *pair, "--fail-if", "val_loss > 0.5", "--fail-if", "val_loss > -0.01", code=5
    )
    untold = labkit_says(*pair, "--fail-if", "peak_memory > -50%", "--json", code=6)
    assert problems(untold, "labkit.compare/1") == [] and json.loads(untold)["passed"] is None
    (folder / "train.py").write_text(script.replace("0.025", "0.05"))
    labkit_says("launch", "train.py", "--nproc-per-node", 2, "--name", "slow")
    with pytest.raises(AssertionError, match=r": [56]\n"):
        labkit_says("compare", "slow", "--base", "old-1", "old-2", "--fail-if", "step_time > 10%")
    assert labkit_says("compare", "old-1", "new-1", "slow", "--fail-if", "val_loss > 1", code=2) == ""
    assert labkit_says(*pair, "--fail-if", "val_los > 1", code=2) == ""
