"""A run that was restarted: where its attempts write, how they are read, and the reserve for a full disk."""

from __future__ import annotations

import errno
import json
import os
import time
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

import labkit
from labkit import Run
from labkit import files as files_module
from labkit.charts import drawn
from labkit.checking import facts_of
from labkit.files import write_json
from labkit.launcher.causes import failure_advice
from labkit.launcher.causes.failure_advice import disk_advice, fragmented, memory_advice
from labkit.launcher.causes.sentences import memory_in_words
from labkit.launcher.torchrun_command import attempt_command
from labkit.record import RunFolder, RunReader, State
from labkit.record.folder import RESERVE_BYTES
from labkit.record.table import rows
from labkit.view.live.page import run_html, run_text
from labkit.view.live.run_charts import Look, run_charts
from labkit.view.live.verdict import training_loss
from labkit.view.run_list import RunList
from labkit.words import attempt_ended
from labkit.write import Script


def lines(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def step(t, number, **more):
    return {"k": "step", "t": t, "step": number, "n": 1, "seconds": [1.0, 1.0, 1.0], "samples": 4, "rss": 5, **more}


@pytest.fixture
def begun_again(folder):
    """Attempt 1 makes steps 1 to 3 and falls; attempt 2 goes on from 2, on a host clock of its own."""
    created = datetime.fromtimestamp(1000.0, UTC).isoformat()
    write_json(folder.manifest, {"created": created})
    lines(
        folder.metrics(0),
        {"k": "meta", "t": 500.0, "time": 1000.0},
        step(501, 1, loss=9.0),
        step(502, 2, loss=8.0),
        step(503, 3, loss=7.0),
    )
    second = folder.attempt(2)
    lines(
        second.metrics(0),
        {"k": "meta", "t": 20.0, "time": 1010.0},
        {"k": "report", "t": 20.5, "start_step": 2},
        step(21, 1, loss=7.5),
        step(22, 2, loss=6.0),
    )
    return folder


def test_a_run_restarted_on_fewer_ranks_is_shown_with_those_that_are_left(folder):
    write_json(folder.manifest, {"format": 1, "name": "demo", "world_size": 3, "parameters": {}})
    for attempt, ranks, first in ((folder, 3, 1), (folder.attempt(2), 2, 3)):
        for rank in range(ranks):
            meta = {"k": "meta", "t": 0.0, "world_size": ranks}
            lines(attempt.metrics(rank), meta, *(step(i, i, loss=1.0) for i in range(first, first + 3)))
    earlier = [{"cause": {"sentence": "rank 2 was killed"}, "checkpoint": "step-2", "restarted_ranks": 2}]
    State("succeeded", 0.0, 9.0, attempt=2, earlier=earlier, ranks=2).write(folder)
    reader, run = RunReader(folder).read_all(), Run(folder)

    assert list(reader.ranks) == [0, 1, 2] and list(reader.current) == reader.rank_numbers == [0, 1]
    assert "step 5" in repr(run) and "10 samples/s on average" in repr(run) and "rank 2  device" not in repr(run)
    assert "3 → 2" in repr(RunList([run])) and "3 → 2" in str(labkit.compare([run]))
    assert "<th>world_size</th><td>3 → 2</td>" in run.report().read_text()


def test_the_first_attempt_is_the_folder_itself_and_others_lie_within_it(folder):
    assert folder.attempt(1) is folder
    assert folder.attempts() == [folder]
    for number in (2, 10, 3):
        (folder.path / "attempts" / str(number)).mkdir(parents=True)
    (folder.path / "attempts" / "2x").mkdir()
    assert [a.path.name for a in folder.attempts()] == [folder.id, "2", "3", "10"]
    assert folder.latest.path.name == "10"
    command = attempt_command(["a", str(folder.torchrun_logs), "b"], folder, folder.latest, 5.0)
    assert command == ["a", str(folder.latest.torchrun_logs), "b"]


@pytest.mark.parametrize(("given", "elapsed", "left"), [("60", 20.0, "40"), ("60", 80.0, "1"), ("soon", 20.0, "soon")])
def test_a_deadline_does_not_start_again(folder, given, elapsed, left):
    (folder.path / "attempts" / "2").mkdir(parents=True)
    command = ["a", "--deadline-seconds", given, "b"]

    assert attempt_command(command, folder, folder, elapsed) == command
    assert attempt_command(command, folder, folder.latest, elapsed) == ["a", "--deadline-seconds", left, "b"]


def test_the_curve_continues(begun_again):
    reader = RunReader(begun_again).read_all()
    history = reader.ranks[0]

    assert [(round(x), last) for x, _, _, last in history.series["loss"].points()] == [
        (1, 9.0),
        (2, 8.0),
        (3, 7.0),
        (11, 7.5),
        (12, 6.0),
    ]
    assert history.step == 4
    assert reader.restarts == [10.0]
    assert reader.undecodable == 0


def test_it_is_read_while_it_is_being_restarted(folder, begun_again):
    hidden = folder.path / "hidden"
    (folder.path / "attempts").rename(hidden)
    reader = RunReader(folder)
    reader.poll()
    assert reader.ranks[0].step == 3
    hidden.rename(folder.path / "attempts")
    reader.poll()
    assert reader.ranks[0].step == 4
    assert not reader.poll()


def test_rows_have_their_attempt_and_their_time_continues(begun_again):
    got = [(row["attempt"], row["step"], row["loss"], row["time"]) for row in rows(begun_again)]

    assert got == [(1, 1, 9.0, 1.0), (1, 2, 8.0, 2.0), (1, 3, 7.0, 3.0), (2, 3, 7.5, 11.0), (2, 4, 6.0, 12.0)]


def test_losses_are_means_over_all_ranks_and_of_the_last_attempt(begun_again, folder):
    assert Run(folder).losses().to_dict() == {1: 9.0, 2: 8.0, 3: 7.5, 4: 6.0}

    start = {"k": "meta", "t": 20.0, "time": 1010.0}, {"k": "report", "t": 20.5, "start_step": 2}
    lines(folder.attempt(2).metrics(1), *start, step(22.0, 2, loss=5.0))
    assert Run(folder).losses().to_dict() == {1: 9.0, 2: 8.0, 3: 7.0, 4: 5.5}  # attempt 2's rank 1 skipped step 3


def test_a_run_without_losses_has_none(folder):
    assert Run(folder).losses().empty


def test_steps_that_are_repeated_are_no_rise_of_the_loss(folder):
    write_json(folder.manifest, {"created": datetime.fromtimestamp(1000.0, UTC).isoformat()})
    starts = ({"k": "meta", "t": 0.0, "time": 1000.0}, {"k": "meta", "t": 0.0, "time": 1110.0})
    lines(folder.metrics(0), starts[0], *(step(t, t, loss=300 - t) for t in range(1, 101)))
    before = training_loss(RunReader(folder).read_all(), State("running", 0.0))
    lines(folder.attempt(2).metrics(0), starts[1], *(step(t, t, loss=300 - t) for t in range(1, 21)))

    assert before.startswith("loss is still falling: ")
    assert training_loss(RunReader(folder).read_all(), State("running", 0.0)).startswith("loss fell from 297 to 282 ")


def test_the_view_shows_it(begun_again):
    ended = {"cause": {"sentence": "rank 0 fell <i>"}, "checkpoint": "step-2", "exit_code": 1, "ended": 5.0}
    state = State("running", time.time(), attempt=2, earlier=[ended], notice="no rank has made progress <b>")
    state.write(begun_again)
    reader = RunReader(begun_again).read_all()

    page, text = run_html(begun_again, reader, state), run_text(begun_again, reader, state)

    assert attempt_ended(1, ended) == "attempt 1 failed: rank 0 fell <i>; restarted from step-2"
    assert attempt_ended(1, ended | {"checkpoint": None}).endswith("; restarted")
    assert "attempt 1 failed: rank 0 fell &lt;i&gt;; restarted from step-2" in page
    assert "no rank has made progress &lt;b&gt;" in page
    assert "attempt 1 failed" in text
    assert "no rank has made progress <b>" in text
    assert drawn(run_charts(reader, Look())).count("↻") == 4


@pytest.mark.parametrize(
    "broken", [{"earlier": 3}, {"earlier": [3]}, {"attempt": "2"}, {"notice": 5}, {"earlier": None}]
)
def test_a_state_whose_attempts_make_no_sense_is_damaged(folder, broken):
    write_json(folder.state, {"state": "running", "started": 1.0} | broken)

    assert State.read(folder).state == "lost"


def test_the_newest_checkpoint_is_the_highest_that_was_committed(folder):
    assert folder.newest_checkpoint() is None
    for name in ("step-9", "step-10", "step-11.tmp", "step-x"):
        (folder.checkpoints / name).mkdir(parents=True)
        (folder.checkpoints / name / "COMMIT.json").touch()
    (folder.checkpoints / "step-12").mkdir()
    assert folder.newest_checkpoint() == "step-10"


def test_checkpoints_are_found_where_the_script_saves_them(folder, tmp_path):
    write_json(folder.manifest, {"parameters": {"checkpoint_dir": "mine"}, "cwd": str(tmp_path)})
    assert folder.checkpoint_folder() == tmp_path / "mine"
    write_json(folder.manifest, {"parameters": 5})
    assert RunFolder(folder.path).checkpoint_folder() == folder.checkpoints


def test_a_save_is_going_on_while_its_folder_is_written_to(folder):
    beside = folder.checkpoints / "step-3.tmp"
    assert not folder.checkpoint_being_saved()
    beside.mkdir(parents=True)
    assert folder.checkpoint_being_saved()
    (beside / "x").touch()
    for path in (beside / "x", beside):
        os.utime(path, (1, 1))
    assert not folder.checkpoint_being_saved()
    (beside / "x").write_text("more")
    assert folder.checkpoint_being_saved()


def test_on_a_full_disk_the_reserve_is_given_up_bit_by_bit(folder, monkeypatch):
    folder.keep_reserve()
    real, full = files_module._replace, [OSError(errno.ENOSPC, "No space left on device")] * 2

    def replace(path, value):
        if full:
            raise full.pop()
        real(path, value)

    monkeypatch.setattr(files_module, "_replace", replace)
    with pytest.raises(OSError, match="No space"):
        write_json(folder.state, {"a": 1}, reserve=folder.reserve)
    assert folder.reserve.stat().st_size == RESERVE_BYTES // 2
    write_json(folder.state, {"a": 1}, reserve=folder.reserve)
    assert json.loads(folder.state.read_text()) == {"a": 1}


def test_memory_is_reported_by_category(folder, write_metrics):
    write_metrics(
        0,
        {"k": "meta", "t": 1.0},
        {"k": "model", "t": 2.0, "device": "cuda:0", "parameters": 2**30, "gradients": 2**30, "optimizer": 2**31},
    )
    history = RunReader(folder).read_all().ranks[0]
    memory = {"allocated": 6 * 2**30, "reserved": 7 * 2**30, "free": 2**30, "total": 15 * 2**30}

    assert memory_in_words("device", memory, history) == (
        "; 6.00 GiB of 15.00 GiB were allocated (parameters 1.00 GiB, gradients 1.00 GiB, optimizer 2.00 GiB, "
        "activations and buffers 2.00 GiB), 1.00 GiB reserved but unallocated, "
        "7.00 GiB of the device were held by other processes, CUDA or NCCL"
    )
    assert memory_in_words("host", {"peak": 2**30}, None) == "; it held up to 1.00 GiB (resident set)"
    assert memory_in_words("device", {}, None) == ""


def test_memory_that_the_allocator_reserved_in_vain_is_named_and_what_helps():
    memory = {"allocated": 11 * 2**30, "reserved": 14 * 2**30, "free": 2**27, "total": 15 * 2**30}

    assert memory_in_words("device", memory, None).endswith(" were allocated, 3.00 GiB reserved but unallocated")
    assert "expandable_segments:True" in memory_advice("device", Script.load("ddp"), {}, fragments=fragmented(memory))
    assert not fragmented(memory | {"reserved": 11.2 * 2**30})


def device_advice(script, parameters=None):
    return memory_advice("device", script, parameters or {}, facts_of(str(script)))


def test_advice_is_what_the_script_offers_and_does_not_do_yet():
    ddp = device_advice(Script.load("ddp"), {"accumulate": "4"})
    fsdp = device_advice(Script.load("fsdp"), {"activation_checkpointing": "True", "precision": "bf16"})
    own = device_advice(Script.parse("print(1)\n"))

    assert "raise accumulate (now 4)" in ddp
    assert "activation_checkpointing=True" in ddp
    assert "precision='bf16'" in ddp
    assert "fsdp" in ddp
    assert fsdp == "to make it fit:\n- raise accumulate (now 1)"
    assert own == "to make it fit:\n- shard the model: Script.load('fsdp')"
    assert "fewer DataLoader workers" in memory_advice("host", Script.load("ddp"), {})


OWN_DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\nfrom mine import Net\nnet = DDP(Net())\n"
OWN = {
    "fsdp1": "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nmodel = FSDP(build())\n",
    "fsdp1 by its module": "import torch.distributed.fsdp as f\nmodel = f.FullyShardedDataParallel(build())\n",
    "fsdp2, bound": "from torch.distributed.fsdp import fully_shard\nshard = partial(fully_shard)\n",
    "Trainer": "from transformers import Trainer\nTrainer(model).train()\n",
    "accelerate": "from accelerate import Accelerator\nmodel = Accelerator().prepare(model)\n",
    "DeepSpeed": "import deepspeed\nengine, *_ = deepspeed.initialize(model=model)\n",
    "DDP or accelerate": f"import accelerate\n{OWN_DDP}",
    "in another module": "from mine import main\nmain()\n",
    "by hand": "import torch.distributed as dist\ndist.all_gather_into_tensor(whole, part)\n",
    "a parallel layer": "import torch.distributed as dist\ndef forward(self, x):\n    dist.all_reduce(x)\n",
    "no Python": "model = FSDP(\n",
}


@pytest.mark.parametrize("text", OWN.values(), ids=OWN)
def test_who_shards_already_or_may_do_so_is_not_told_to_shard(text):
    assert "shard" not in device_advice(Script.parse(text))


@pytest.mark.parametrize("name", ["fsdp", "fsdp1", "zero2", "tensor_parallel", "pipeline", "hybrid"])
def test_a_strategy_that_shards_is_not_advised_to(name):
    assert "shard" not in device_advice(Script.load(name))


@pytest.mark.parametrize("script", [Script.load("single"), Script.load("zero1"), Script.parse(OWN_DDP)])
def test_a_model_that_is_seen_to_be_replicated_may_be_sharded(script):
    assert "shard the model: Script.load('fsdp')" in device_advice(script)


def test_a_script_that_checkpoints_its_activations_is_not_told_to():
    plain = "from torch.distributed.fsdp import fully_shard\nfully_shard(model)\n"

    assert device_advice(Script.parse(plain)) == "to make it fit:\n- a smaller batch\n- activation checkpointing"
    for does in ("from torch.utils.checkpoint import checkpoint\n", "model.gradient_checkpointing_enable()\n"):
        assert device_advice(Script.parse(does + plain)) == "to make it fit:\n- a smaller batch"


def test_a_full_disk_is_recognised_by_what_torch_makes_of_it(folder, monkeypatch):
    assert disk_advice(folder, "RuntimeError: unexpected pos 704 vs 598") == ""  # there is room here
    monkeypatch.setattr(failure_advice.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert disk_advice(folder, "RuntimeError: unexpected pos 704 vs 598").endswith(str(folder.path))
    assert disk_advice(folder, "RuntimeError: boom") == ""
    (folder.checkpoints / "step-3").mkdir(parents=True)
    (folder.checkpoints / "step-3" / "COMMIT.json").touch()
    assert disk_advice(folder, "[Errno 28] No space left on device").endswith("; checkpoint step-3 is complete")


def test_an_attempt_is_not_a_separate_run(begun_again):
    from labkit.stored_runs import list_runs

    assert RunFolder(begun_again.path / "attempts" / "2").script.name == "script.py"
    assert [run.id for run in list_runs(begun_again.path.parent)] == [begun_again.id]
