"""Reaching into real ranks: all answer at the same step, as a script that prints would, and none is worse for it."""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults.scene import last_step, ranks_of, wait_until

import labkit
from labkit import cli

SCRIPTS = Path(__file__).parents[1] / "scripts"
ASKED = SCRIPTS / "asked.py"
PRINTED = "loss.item().hex(), x.sum().item().hex()"
RATE = "optimizer.param_groups[0]['lr']"
WATCHDOG_SECONDS = 12


def printed(run: labkit.Run, rank: int) -> dict[int, list[str]]:
    """What the script prints after each step."""
    *lines, _ = run.logs(rank=rank, stream="stdout").split("\n")
    return {int(step): values for step, *values in map(str.split, lines)}


def test_ranks_answer_pause_and_change_at_the_same_step_and_the_training_is_otherwise_the_same() -> None:
    run = labkit.launch(ASKED, nproc_per_node=2, args=["--sleep", "0.002"], watchdog=WATCHDOG_SECONDS, wait=False)
    answers = [run.ask(f"step, {PRINTED}") for _ in range(5)]
    with ThreadPoolExecutor(3) as threads:  # several at once
        answers += threads.map(lambda _: labkit.attach(run.path).ask(f"step, {PRINTED}"), range(3))

    failed = run.ask("1 / 0, model.training, x.shape, torch.rand(()), y[:2]")
    assert [*failed["1 / 0"]] == ["ZeroDivisionError: division by zero"] * 2
    assert [*failed["model.training"]] == [True, True]
    assert [*failed["x.shape"]] == ["torch.Size([8, 4])"] * 2
    assert failed["y[:2]"][0].shape == (2, 1)
    assert [*run.ask("step", ranks=[1])["rank"]] == [1]
    assert "TimeoutError" in run.ask("[0 for _ in iter(int, 1)]", timeout=1)["[0 for _ in iter(int, 1)]"][0]
    with pytest.raises(labkit.LabError, match="expected an expression"):
        run.ask("step = 3")
    with pytest.raises(labkit.LabError, match="name 'nope' is not defined"):
        run.watch("nope")

    run.watch("grad_norm(model)", every=7, name="norm")
    paused_at = run.pause()
    assert [*run.ask("step")["step"]] == [paused_at] * 2
    assert str(run.status()).startswith("paused after ")
    time.sleep(WATCHDOG_SECONDS + 4)
    assert run.status().state == "running"
    assert run.status().notice == "paused; resume it with run.resume() or `labkit resume`"
    assert {len(printed(run, rank)) for rank in (0, 1)} == {paused_at - 1}
    assert run.step(10) == paused_at + 10
    answers.append(run.ask(f"step, {PRINTED}"))
    assert [*answers[-1]["step"]] == [paused_at + 10] * 2

    changed_at = run.set(lr=0.05)
    assert changed_at == paused_at + 11
    assert run.step() == changed_at
    assert [*run.ask(RATE)[RATE]] == [0.05, 0.05]
    with pytest.raises(labkit.LabError, match="the optimizer has no option 'rate'; it has lr,"):
        run.set(rate=1)
    with pytest.raises(labkit.LabError, match="expected a value of that type"):
        run.set(lr="fast")
    run.resume()
    wait_until(lambda: last_step(run.folder, 0) > changed_at + 200)
    run.unwatch("norm")

    steps = [{*answer["step"], *answer["step_"]} for answer in answers]
    assert all(len(step) == 1 for step in steps), steps
    for rank in (0, 1):
        log = printed(run, rank)
        for answer in answers:
            assert [*answer.iloc[rank, 3:]] == log[answer["step"][rank]]
    norms = run.metrics().dropna(subset="norm")
    assert {*norms["rank"]} == {0, 1}
    assert len(norms) >= 40
    assert {step % 7 for step in norms["step"]} == {0}
    events = [json.loads(line) for line in run.folder.events.read_text().splitlines()]
    assert {"kind": "set", "values": {"lr": 0.05}, "step": changed_at - 1}.items() <= next(
        event.items() for event in events if event["kind"] == "set"
    )
    run.pause()
    assert run.stop().killed == 0
    assert "lr=0.05" in run.report().read_text()

    changes = ["--change-at", str(changed_at - 1), "--steps", str(changed_at + 200)]
    alone = labkit.launch(ASKED, nproc_per_node=2, args=changes, reachable=False, wait=False)
    assert alone.wait().state == "succeeded"
    with pytest.raises(labkit.LabError, match="is not running: succeeded"):
        alone.ask("step")
    for rank in (0, 1):
        expected = printed(alone, rank)
        assert len(expected) == changed_at + 200
        assert {step: values for step, values in printed(run, rank).items() if step in expected} == expected


def test_sharded_tensors_are_gathered_and_a_rank_that_does_not_come_ends_the_request_only() -> None:
    run = labkit.launch(
        ASKED, nproc_per_node=2, args=["--fsdp", "--sleep", "0.5", "--busy-at", "10"], wait=False, watchdog=60
    )
    whole = "sum(p.full_tensor().square().sum() for p in model.parameters()) ** 0.5"
    answer = run.ask(f"step, weight_norm(model), {whole}, next(model.parameters()).norm(), grad_norm(model)")
    assert {*answer["step"], *answer["step_"]} == {answer["step"][0]}
    assert answer["weight_norm(model)"][0] == pytest.approx(answer[whole][1], rel=1e-6)
    assert answer.iloc[0, 3:].to_list() == answer.iloc[1, 3:].to_list()

    observed = "update_ratio(optimizer), largest_output(model), 0.01 * grad_norm(model) / weight_norm(model)"
    assert (run.ask(observed).iloc[:, 2:4] == "measured from the next step on").all(axis=None)
    ratio, largest, expected = run.ask(observed).iloc[:, 2:].to_numpy().T
    assert ((ratio / expected).mean() - 1) ** 2 < 0.3**2  # each rank's is of its own shards
    assert largest.min() > 0

    wait_until(lambda: len(printed(run, 0)) >= 9)
    time.sleep(1)
    started = time.monotonic()
    with pytest.raises(labkit.LabError, match="did not reach the end of step (10|11) within .* so nothing was done"):
        run.ask("step", timeout=6)
    assert time.monotonic() - started < 15
    wait_until(lambda: len(printed(run, 1)) > 11)
    assert len(run.ask("step")) == 2

    processes = ranks_of(run.folder)
    processes[1].suspend()
    with pytest.raises(labkit.LabError, match="rank 1 did not respond within"):
        run.pause()
    processes[1].resume()
    done = len(printed(run, 0))
    wait_until(lambda: len(printed(run, 0)) > done)

    asking = ThreadPoolExecutor(1).submit(run.exec, "import time\ntime.sleep(30)")
    wait_until(lambda: "30" in run.folder.events.parent.joinpath("requests/6/request.json").read_text())
    processes[1].kill()
    with pytest.raises(labkit.LabError, match="ended before every rank had answered"):
        asking.result(timeout=30)
    assert run.status().cause["rank"] == 1


def test_the_state_says_that_a_run_is_paused_as_soon_as_pause_returns() -> None:
    run = labkit.launch(ASKED, nproc_per_node=2, args=["--sleep", "0.002"], wait=False)
    elsewhere = labkit.attach(run.path)
    for _ in range(3):
        run.pause()
        assert run.status().is_paused
        assert str(elsewhere.status()).startswith("paused after ")
        run.step()
        assert run.status().is_paused
        elsewhere.resume()
        assert not run.status().is_paused
    stopped = ranks_of(run.folder)[1]
    stopped.suspend()
    with pytest.raises(labkit.LabError, match="rank 1 did not"):
        run.pause(timeout=3)
    stopped.resume()
    assert not run.status().is_paused
    last = last_step(run.folder, 0)
    wait_until(lambda: last_step(run.folder, 0) > last + 20)
    assert not run.status().is_paused
    run.stop()


def test_pause_takes_the_newest_active_run_and_resume_the_newest_paused_one(capsys) -> None:
    older, newer = (labkit.launch(ASKED, nproc_per_node=1, args=["--sleep", "0.002"], wait=False) for _ in range(2))
    ended = labkit.launch(ASKED, nproc_per_node=1, args=["--sleep", "0.002"], wait=False)
    ended.stop()
    older.pause()
    capsys.readouterr()

    assert cli.main(["resume"]) == 0
    assert capsys.readouterr().out == f"{older.id}: resumed\n"
    assert not older.status().is_paused

    assert cli.main(["pause"]) == 0
    assert capsys.readouterr().out.startswith(f"{newer.id}: paused at the end of step ")
    assert [run.status().is_paused for run in (older, newer)] == [False, True]
    older.stop()
    newer.stop()


def test_a_breakpoint_pauses_all_ranks_at_the_first_step_where_it_holds_on_one() -> None:
    run = labkit.launch(ASKED, nproc_per_node=2, args=["--sleep", "0.002"], watchdog=WATCHDOG_SECONDS, wait=False)
    with pytest.raises(labkit.LabError, match="nope > 1 cannot be a condition: NameError"):
        run.breakpoint("nope > 1")
    with pytest.raises(labkit.LabError, match="expected an expression"):
        run.breakpoint("loss >")
    step = run.pause()
    wanted = step + 50
    assert run.until(f"step == {wanted} and dist.get_rank() == 1") == wanted
    assert [*run.ask("step")["step_"]] == [wanted, wanted]
    wait_until(lambda: f"because step == {wanted}" in str(run.status().notice), what=run.status)
    assert "holds on rank 1; resume it with run.resume() or `labkit resume`" in str(run.status().notice)
    time.sleep(WATCHDOG_SECONDS + 2)
    assert run.status().state == "running"
    run.step(2)
    wait_until(lambda: run.status().notice == "paused; resume it with run.resume() or `labkit resume`", what=run.status)

    run.breakpoint("step % 7 == 0")
    run.breakpoint("loss != loss")  # in its place
    run.resume()
    wait_until(lambda: last_step(run.folder, 0) > wanted + 100)
    assert run.status().state == "running"
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(run.until, "loss > 1e9")
        wait_until(lambda: "1e9" in run.folder.events.read_text())
        run.breakpoint(None)
        with pytest.raises(labkit.LabError, match="another breakpoint replaced loss > 1e9"):
            waiting.result(timeout=30)

    run.breakpoint("loss > 1e9")
    ranks_of(run.folder)[1].kill()
    with pytest.raises(labkit.RankFailedError) as failure:
        run.wait()
    assert failure.value.cause["rank"] == 1
    with pytest.raises(labkit.LabError, match="is not running: failed"):
        run.until("loss > 1")
    expected = labkit.launch(ASKED, nproc_per_node=2, args=["--steps", str(wanted)], reachable=False, wait=False)
    expected.wait()
    for rank in (0, 1):
        alone = printed(expected, rank)
        assert {step: values for step, values in printed(run, rank).items() if step in alone} == alone


def test_a_checkpoint_is_saved_on_request_and_resumed_from(tmp_path: Path) -> None:
    options = {"nproc_per_node": 2, "checkpoint_dir": tmp_path / "saved", "global_batch_size": 16, "wait": False}
    run = labkit.launch("ddp", epochs=500, clip=1.0, **options)
    with pytest.raises(labkit.LabError, match="capturable, .*, and the script clip"):
        run.set(cilp=0.5)
    run.set(lr=2e-5, clip=0.5)
    assert math.isfinite(run.ask("loss.item()")["loss.item()"][0])  # a name of main, which called update
    step = int(run.save().removeprefix("step-"))
    assert (tmp_path / "saved" / f"step-{step}" / "COMMIT.json").exists()
    paused_at = run.pause()
    with pytest.raises(labkit.LabError, match="only save at its end; resume"):
        run.save()
    run.resume()
    for rank in ranks_of(run.folder).values():
        rank.kill()  # without a last checkpoint
    with pytest.raises(labkit.RankFailedError):
        run.wait()
    assert step <= paused_at

    resumed = labkit.launch("ddp", epochs=500, clip=1.0, **options)
    assert resumed.ask(f"{RATE}, args.clip").iloc[:, 2:].to_numpy().tolist() == [[2e-5, 0.5]] * 2
    assert f"resumes after step {step}" in resumed.logs(rank=0)
    (event,) = (event for event in map(json.loads, resumed.folder.events.open()) if event["kind"] == "set")
    assert (event["step"], event["values"]) == (0, {"lr": 2e-5, "clip": 0.5})
    resumed.stop()

    other = labkit.launch(ASKED, nproc_per_node=1, args=["--sleep", "0.01"], wait=False)
    with pytest.raises(labkit.LabError, match="works only in labkit's own scripts"):
        other.save()
    other.stop()


LONG = ["100000"]


@pytest.mark.parametrize(
    ("script", "options", "expression"),
    [
        pytest.param(SCRIPTS / "with_accelerate.py", {"args": LONG}, "loss.item()", marks=pytest.mark.soak),
        (SCRIPTS / "with_lightning.py", {"args": LONG}, "weight_norm(trainer.model)"),
        (SCRIPTS / "with_trainer.py", {"args": LONG}, "inputs['input_ids'].numel()"),
        ("pipeline", {"epochs": 500}, "loss.item()"),
        pytest.param("fsdp1", {"epochs": 500}, "grad_norm(model)", marks=pytest.mark.soak),
        pytest.param("tensor_parallel", {"epochs": 500}, "weight_norm(model)", marks=pytest.mark.soak),
    ],
    ids=lambda value: Path(value).stem if isinstance(value, str | Path) else "",
)
def test_trainers_and_every_kind_of_parallelism_can_be_asked_paused_and_changed(
    script, options, expression, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where Trainer saves
    run = labkit.launch(script, nproc_per_node=2, wait=False, **options)
    for _ in range(3):
        answer = run.ask(expression, timeout=120)
        assert answer["step"].nunique() == 1
        assert [math.isfinite(value) for value in answer[expression]] == [True, True], answer
    step = run.pause()
    assert run.step(2) == step + 2
    assert run.set(weight_decay=0.25) == step + 3
    run.step()
    assert [*run.ask("optimizer.param_groups[0]['weight_decay']").iloc[:, 2]] == [0.25, 0.25]
    assert run.until(f"{expression} == {expression}") == step + 4
    run.resume()
    wait_until(lambda: last_step(run.folder, 0) > step + 10)
    assert run.stop().state == "stopped"


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seconds", [0.002, 0.5])
def test_the_ranks_answer_at_the_same_step_200_times_out_of_200(ranks, seconds) -> None:
    run = labkit.launch(ASKED, nproc_per_node=ranks, args=["--sleep", str(seconds)], wait=False)
    answers = [run.ask("step, loss.item().hex()") for _ in range(200)]
    run.stop()
    assert [len({*answer["step"], *answer["step_"]}) for answer in answers] == [1] * 200
    logs = [printed(run, rank) for rank in range(ranks)]
    for answer in answers:
        assert [*answer["loss.item().hex()"]] == [logs[rank][answer["step"][0]][0] for rank in range(ranks)]


def test_requests_during_validation_saving_and_a_restart_are_answered_or_end_with_a_reason(tmp_path) -> None:
    often = {"save_every": 3, "validate_every": 4, "checkpoint_dir": tmp_path / "saved", "async_save": True}
    run = labkit.launch("ddp", nproc_per_node=2, epochs=500, retries=1, wait=False, **often)
    answers = [run.ask("step, loss.item()") for _ in range(12)]
    assert [answer["step"].nunique() for answer in answers] == [1] * 12
    # the loop counts the step after it has ended
    assert all((answer["step_"] == answer["step"] - 1).all() for answer in answers)

    processes = ranks_of(run.folder)
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(run.exec, "import time\ntime.sleep(60)")
        requests = run.folder.latest.requests
        wait_until(lambda: any("sleep" in path.read_text() for path in requests.glob("*/request.json")))
        time.sleep(2)
        processes[1].kill()
        with pytest.raises(labkit.LabError, match="ended before every rank had answered"):
            asking.result(timeout=60)
    wait_until(lambda: run.status().attempt == 2 and run.status().state == "running", what=run.status)
    assert run.ask("step", timeout=120)["step"].nunique() == 1
    run.stop()
