"""Real ranks that are held at a line of their script: all of them or none, and the training is otherwise the same."""

import json
import time
from pathlib import Path

import pytest
from faults.scene import last_step, wait_until

import labkit

SCRIPT = Path(__file__).parents[1] / "scripts" / "with_loader.py"
LINES = {text.strip(): number for number, text in enumerate(SCRIPT.read_text().splitlines(), 1)}
LOSS = LINES["loss = scale * nn.functional.mse_loss(out, y)"]
AT, ENV = f"with_loader.py:{LOSS}", {"OMP_NUM_THREADS": "1"}
RESUME = "; resume it with run.resume() or `labkit resume`"
STALLED_SECONDS = 7  # a rank that made no progress for so long, and waits for nobody, would be reported


def launched(*arguments, **options):
    return labkit.launch(SCRIPT, nproc_per_node=2, args=[*arguments], env=ENV, wait=False, **options)


def losses(run, rank):
    """What the script has printed, by step."""
    lines = [line.split() for line in run.logs(rank=rank, stream="stdout").splitlines()]
    return {int(line[0]): float.fromhex(line[1]) for line in lines if len(line) == 2 and line[0].isdecimal()}


def test_ranks_are_held_within_a_step_asked_and_changed_there_and_go_on():
    run = launched("100000")
    step = run.breakpoint(at=AT)

    assert run.status().notice.startswith(f"held at {AT} in train_step, all ranks{RESUME}")
    assert str(run.status()).startswith("held after ")
    assert run.verdict()[0].startswith(f"held at {AT} in train_step, all ranks")
    asked = run.ask("rank, out.shape, x.sum(), step")  # `step` is the loop's, in a frame that called this one
    assert [*asked["rank_"]] == [0, 1]
    assert [*asked["out.shape"]] == ["torch.Size([8, 1])"] * 2
    assert asked["x.sum()"].nunique() == 2
    assert [*asked["step"], *asked["step_"]] == [step] * 4
    assert [*run.ask("rank", ranks=[1])["rank_"]] == [1]
    run.exec("out = y + 100.0 + 0 * out\nseen = 1")
    assert [*run.ask("(out - y).mean()").iloc[:, 2]] == pytest.approx([100.0] * 2)
    assert "NameError" in run.ask("seen")["seen"][0]  # not a variable of train_step
    assert run.set(lr=0.02) == step + 1  # this reads the variables of all frames, and must not change them
    with pytest.raises(labkit.LabError, match="works only in labkit's own scripts"):
        run.save()
    held = time.monotonic()
    time.sleep(STALLED_SECONDS)
    assert run.status().notice == f"held at {AT} in train_step, all ranks{RESUME}"
    held = time.monotonic() - held
    assert run.step() == step + 1
    assert run.status().notice.startswith(f"paused{RESUME}")

    assert run.until(at=AT) == step + 1  # within the next step
    assert run.until(at=f"with_loader.py:{LOSS + 1}") == step + 1
    assert [*run.ask("loss.ndim")["loss.ndim"]] == [0, 0]
    run.resume()
    wait_until(lambda: last_step(run.folder, 0) > step + 10)
    for rank in (0, 1):
        assert losses(run, rank)[step + 1] == pytest.approx(10_000)
        assert losses(run, rank)[step + 2] < 1_000
    assert run.metrics()["step_seconds"].max() < held / 2  # the time is not part of a step
    events = [json.loads(line) for line in run.folder.events.read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "hit"] == [step, step + 1, step + 1]

    assert run.breakpoint("x.sum() > 2 and rank == 1", at=AT) is None
    wait_until(lambda: run.status().is_paused, what=run.status)
    assert f"held at {AT} in train_step, all ranks, because of rank 1: x.sum() > 2" in run.status().notice
    _, of_rank_1 = run.ask("x.sum()")["x.sum()"]
    assert of_rank_1 > 2
    assert run.stop().state == "stopped"


def test_what_cannot_hold_all_ranks_is_refused_and_changes_no_loss():
    run = launched("500", "calls_on_rank_0", "calls_elsewhere")
    wait_until(lambda: "not held: rank 1 did not come to with_loader.py" in str(run.status().notice), what=run.status)
    with pytest.raises(labkit.LabError, match=r"expected an expression, got '1 \+'"):
        run.breakpoint("1 +", at=AT)
    with pytest.raises(labkit.LabError, match="nope > 1 cannot be evaluated at .*: NameError"):
        run.until("nope > 1", at=AT)
    with pytest.raises(labkit.LabError, match="breakpoint needs a condition, a line"):
        run.breakpoint()
    run.breakpoint("x.sum() > 1e9", at=AT)
    run.breakpoint(None)
    for at, message in (
        ("with_loader.py", "expected a file and a line, such as at='train.py:26', got 'with_loader.py'"),
        ("nope.py:3", r"nope.py is neither the script nor a module .*; of your own files it runs with_loader.py"),
        (f"with_loader.py:{LOSS - 5}", rf"line {LOSS - 5} .* no code .* nearest lines that have are {LOSS - 4} and"),
        (f"with_loader.py:{LOSS - 1}", r"rank 1 did not come .* within \d+ s; it is at line \d+, waiting for others"),
    ):
        with pytest.raises(labkit.LabError, match=message):
            run.breakpoint(at=at)
        assert not run.status().is_paused
    assert run.wait().state == "succeeded"
    assert "held" not in str(run.status().notice)  # what is said of the thread that failed is another matter

    alone = launched("500", reachable=False)
    assert alone.wait().state == "succeeded"
    for rank in (0, 1):
        assert losses(run, rank) == losses(alone, rank)
        assert "child 7" in run.logs(rank=rank)  # breakpoint() did there what it does anywhere
        assert "BdbQuit" in run.logs(rank=rank, stream="stderr")
        assert "watched False" in run.logs(rank=rank)  # also on the rank that did not come


def test_breakpoint_in_the_script_holds_all_ranks():
    run = launched("60", "calls", "workers")
    wait_until(lambda: run.status().is_paused, what=run.status)
    line = LINES['if step == 20 and "calls" in happens:'] + 1
    assert run.status().notice.startswith(f"held at with_loader.py:{line}, all ranks{RESUME}")
    assert [*run.ask("step")["step_"]] == [20, 20]
    run.exec("steps = 30")  # a variable of the module
    run.resume()
    run.wait()
    assert max(losses(run, 0)) == 32

    env = ENV | {"PYTHONBREAKPOINT": "0"}
    run = labkit.launch(SCRIPT, nproc_per_node=1, args=["30", "calls"], env=env, wait=False)
    assert run.wait(30).state == "succeeded"


HELD_EVERY_STEP = """
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    model(torch.ones(2, 4)).sum().backward()
    time.sleep(0.5)
    breakpoint()
    optimizer.step()
dist.destroy_process_group()
"""


def test_a_request_that_comes_while_ranks_are_on_their_way_to_a_line_is_carried_out_there(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(HELD_EVERY_STEP)
    run = labkit.launch(path, nproc_per_node=2, wait=False, detach=True)
    wait_until(lambda: run.status().is_paused, what=run.status)
    for step, seconds in enumerate((0.1, 0.2, 0.3), 1):
        run._request("resume", steps=None)  # resume() also waits until the state says so
        time.sleep(seconds)
        assert [*run.ask("step", timeout=10)["step_"]] == [step, step]
    began = time.monotonic()
    run.resume()
    assert time.monotonic() - began < 5  # held again, half a second later
    assert [*run.ask("step")["step_"]] == [4, 4]
    run.stop()
