"""The probe on its step path. CUDA cannot be had here: its events, copies and clock are made up and say so."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from labkit.worker.measures.device_clock import DeviceClock
from labkit.worker.probe import Probe


class MadeUpEvent:
    """Each recorded event is ten milliseconds later on the device than the one before."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        assert stream == "stream of cuda:0"
        MadeUpEvent.now += 10.0
        self.at = MadeUpEvent.now

    done = True

    def query(self):
        return MadeUpEvent.done

    def elapsed_time(self, later):
        return later.at - self.at


class MadeUpTorch:
    class cuda:
        Event = MadeUpEvent
        captures = False

        @staticmethod
        def is_current_stream_capturing():
            return MadeUpTorch.cuda.captures

        @staticmethod
        def current_stream(device):
            return f"stream of {device}"


@pytest.fixture
def probe(tmp_path):
    return Probe(tmp_path / "metrics.jsonl")


def records(tmp_path):
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


class Loader:
    pass


def step(probe, loader, optimizer, loss, samples=4):
    probe.after_fetch(0.0, loader, [torch.zeros(samples, 2)])
    probe.before_backward(loss)
    probe.after_backward(True)
    probe.before_step(optimizer)
    probe.after_step(optimizer)


def made(count=1):
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(count)]
    return [torch.optim.SGD([p], lr=0.1) for p in parameters], torch.tensor(2.5)


def test_steps_between_two_records_are_summed_up(probe, tmp_path):
    (optimizer,), loss = made()
    probe._due = float("inf")
    for _ in range(5):
        step(probe, Loader(), optimizer, loss)
    probe.finish("finished")
    model, line, end = records(tmp_path)
    assert (line["step"], line["n"], line["samples"]) == (5, 5, 20)
    assert line["seconds"][1] <= line["seconds"][0] / 5 <= line["seconds"][2]
    held = {"parameters": 12, "gradients": 0, "optimizer": 0}
    assert model.pop("limit") > 1 << 28
    assert model == {"t": model["t"], "k": "model", "device": "cpu"} | held
    assert (end["outcome"], end["step"], end["dropped"]) == ("finished", 5, 0)


def test_a_loss_is_not_kept_alive_by_a_scaler_that_is_disabled(probe):
    """In a process of its own: the hooks are on torch itself."""
    program = """
import gc, tempfile, weakref, torch
from pathlib import Path
from labkit.worker.probe import Probe
Probe(Path(tempfile.mkdtemp()) / "m").start(torch, {})
gc.disable()
scaler, alive = torch.amp.GradScaler("cpu", enabled=False), []
for _ in range(5):
    loss = torch.ones(1, requires_grad=True).sum()
    alive.append(weakref.ref(loss))
    scaler.scale(loss).backward()
print(sum(loss() is not None for loss in alive))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "1", done.stderr


def test_one_step_that_no_backward_came_before_is_not_counted(probe):
    (optimizer,), loss = made()
    probe.before_step(optimizer)
    probe.after_step(optimizer)
    for _ in range(3):
        step(probe, Loader(), optimizer, loss)
    assert probe.step == 3


def test_a_script_without_backward_is_counted_all_the_same(probe):
    (optimizer,), _ = made()
    for _ in range(5):
        probe.before_step(optimizer)
        probe.after_step(optimizer)
    assert probe.step == 5


def test_the_next_trainings_optimizer_takes_over_the_counting(probe):
    kept = []
    for _ in range(3):
        (optimizer,), loss = made()
        kept.append(optimizer)
        for _ in range(10):
            step(probe, Loader(), optimizer, loss)
    assert probe.step == 30


def test_the_last_record_has_the_time_of_its_step_and_not_of_the_end(probe, tmp_path):
    (optimizer,), loss = made()
    probe._due = float("inf")
    step(probe, Loader(), optimizer, loss)
    time.sleep(0.2)
    probe.finish("finished")
    *_, line, end = records(tmp_path)
    assert end["t"] - line["t"] >= 0.2


def test_a_second_optimizer_is_part_of_the_same_step(probe):
    (first, second), loss = made(2)
    for _ in range(3):
        step(probe, Loader(), first, loss)
        probe.before_step(second)
        probe.after_step(second)
    assert probe.step == 3


def test_an_optimizer_that_steps_another_inside_counts_once(probe):
    (outer, inner), loss = made(2)
    for _ in range(3):
        probe.before_backward(loss)
        probe.after_backward(True)
        probe.before_step(outer)
        probe.before_step(inner)
        probe.after_step(inner)
        probe.after_step(outer)
    assert probe.step == 3


def test_a_step_that_raised_does_not_end_the_counting(probe):
    (optimizer,), loss = made()
    probe.before_step(optimizer)
    step(probe, Loader(), optimizer, loss)
    step(probe, Loader(), optimizer, loss)
    assert probe.step == 2


def test_a_batch_that_is_longer_than_its_samples_counts_those(probe, tmp_path):
    """The nodes of its graphs follow each other, or frames of its clips."""
    (optimizer,), loss = made()

    def collate(samples):
        return torch.zeros(50 * len(samples), 2)

    for own in ({"batch_size": 4}, {"batch_sampler": [[0, 1, 2, 3], [4, 5, 6, 7]]}):
        loader = iter(DataLoader(range(8), collate_fn=collate, **own))
        for batch in loader:
            probe.after_fetch(0.0, loader, batch)
            probe.before_backward(loss)
            probe.after_backward(True)
            probe.before_step(optimizer)
            probe.after_step(optimizer)
    probe.finish("finished")
    assert sum(r["samples"] for r in records(tmp_path) if r["k"] == "step") == 16


def test_a_prefetched_batch_is_counted_with_the_backward_that_used_it(probe, tmp_path):
    (optimizer,), loss = made()
    loader = Loader()
    sizes = [4, 4, 2]
    probe.after_fetch(0.0, loader, [torch.zeros(sizes[0], 2)])
    for following in [*sizes[1:], None]:
        if following:
            probe.after_fetch(0.0, loader, [torch.zeros(following, 2)])
        probe.before_backward(loss)
        probe.after_backward(True)
        probe.before_step(optimizer)
        probe.after_step(optimizer)
    probe.finish("finished")
    assert sum(r["samples"] for r in records(tmp_path) if r["k"] == "step") == sum(sizes)


def test_a_loss_that_is_not_a_number_is_written_as_text(probe, tmp_path):
    (optimizer,), _ = made()
    probe._due = 0.0
    step(probe, Loader(), optimizer, torch.tensor(float("nan")))
    assert records(tmp_path)[-1]["loss"] == "nan"


def test_a_full_disk_costs_records_and_nothing_else(probe, monkeypatch, capfd):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    (optimizer,), loss = made()
    for _ in range(3):
        probe._due = 0.0
        step(probe, Loader(), optimizer, loss)
    assert probe.step == 3
    assert probe.recorder.dropped >= 3
    assert "No space left on device" in probe.recorder.problem
    assert capfd.readouterr() == ("", "")  # the streams are the script's


def test_the_device_clock_adds_up_phases_with_made_up_cuda_events():
    clock = DeviceClock(MadeUpTorch, "cuda:0")
    for _ in range(2):
        clock.begin()
        clock.end("forward")
        clock.end("backward")
    clock.begin()
    clock.end("optimizer")
    assert clock.read(3) == pytest.approx({"forward": 0.06, "backward": 0.06, "optimizer": 0.03})


def test_on_made_up_cuda_a_record_waits_for_the_device_and_speaks_of_all_its_steps(probe, tmp_path, monkeypatch):
    probe._device_clock = lambda: DeviceClock(MadeUpTorch, "cuda:0")
    (optimizer,), loss = made()
    loader = Loader()
    probe._due = float("inf")
    step(probe, loader, optimizer, loss)
    probe._due = 0.0
    probe._timed = probe._device_clock()
    step(probe, loader, optimizer, loss)
    monkeypatch.setattr(MadeUpEvent, "done", False)
    probe._flush()
    assert [r["k"] for r in records(tmp_path)] == ["model"]
    monkeypatch.setattr(MadeUpEvent, "done", True)
    probe._flush()
    line = records(tmp_path)[-1]
    assert (line["step"], line["n"], line["loss"]) == (2, 2, 2.5)
    assert line["forward"] == line["backward"] == line["optimizer"] == pytest.approx(0.02)


def test_on_made_up_cuda_the_last_record_waits_for_the_device(probe, tmp_path, monkeypatch):
    probe._device_clock = lambda: DeviceClock(MadeUpTorch, "cuda:0")
    (optimizer,), loss = made()
    probe._due = math.inf
    for _ in range(2):
        step(probe, Loader(), optimizer, loss)
    asked = iter([False] * 20)
    monkeypatch.setattr(MadeUpEvent, "query", lambda event: next(asked, True))
    probe.finish("finished")
    assert [(r["k"], r["step"]) for r in records(tmp_path)[1:]] == [("step", 2), ("end", 2)]

    step(probe, Loader(), optimizer, loss)
    monkeypatch.setattr(MadeUpEvent, "query", lambda event: False)
    probe.finish("finished")
    assert records(tmp_path)[-1]["dropped"] == 1


def test_on_made_up_cuda_a_record_that_ends_early_has_the_phases_of_its_first_step(probe, tmp_path):
    probe._device_clock = lambda: DeviceClock(MadeUpTorch, "cuda:0")
    (optimizer,), loss = made()
    probe._due = 0.0
    step(probe, Loader(), optimizer, loss)  # a record of its own; the next one begins
    for _ in range(3):
        probe._due = math.inf
        step(probe, Loader(), optimizer, loss)
    probe.after_evaluation_fetch()
    probe._flush()
    line = records(tmp_path)[-1]
    assert (line["step"], line["n"]) == (4, 3)
    assert line["forward"] == line["backward"] == line["optimizer"] == pytest.approx(0.03)


def test_on_made_up_cuda_nothing_is_recorded_while_a_graph_is_captured(monkeypatch):
    clock = DeviceClock(MadeUpTorch, "cuda:0")
    monkeypatch.setattr(MadeUpTorch.cuda, "captures", True)
    monkeypatch.setattr(MadeUpEvent, "query", lambda event: pytest.fail("queried during a capture"))
    monkeypatch.setattr(MadeUpEvent, "record", lambda event, stream: pytest.fail("recorded during a capture"))
    clock.begin()
    clock.end("forward")
    clock.keep(torch.tensor(1.0))
    assert not clock.is_done
    assert clock.read(1) == {}


def test_on_made_up_cuda_an_offloaded_optimizer_does_not_hide_the_gpu(probe, tmp_path, monkeypatch):
    cuda, card = torch.cuda, SimpleNamespace(total_memory=15 << 30, uuid="0a1b")
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda, "current_device", lambda: 1)
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(cuda, "memory_stats", lambda device: {"allocated_bytes.all.current": 7})
    (optimizer,), loss = made()  # on the CPU
    optimizer.param_groups.insert(0, {"params": []})
    probe._due = math.inf
    step(probe, Loader(), optimizer, loss)

    model = records(tmp_path)[-1]
    assert (model["device"], model["limit"], model["uuid"]) == ("cuda:1", 15 << 30, "0a1b")
    assert probe._memory()["allocated"] == 7


def test_on_made_up_cuda_an_evaluation_does_not_double_the_phases_of_the_next_step(probe, tmp_path):
    probe._device_clock = lambda: DeviceClock(MadeUpTorch, "cuda:0")
    (optimizer,), loss = made()
    probe._due = float("inf")
    step(probe, Loader(), optimizer, loss)
    probe._timed = probe._device_clock()  # as when the next step is expected to be written
    probe.after_evaluation_fetch()
    probe._due = 0.0
    step(probe, Loader(), optimizer, loss)
    probe.finish("finished")
    first, second = (record for record in records(tmp_path) if record["k"] == "step")
    assert first["forward"] is None
    assert second["forward"] == second["backward"] == second["optimizer"] == pytest.approx(0.01)
