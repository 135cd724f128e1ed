"""The probe on its step path. CUDA cannot be had here: its events, copies and clock are made up and say so."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from labkit.record.history import RankHistory
from labkit.worker.measures import step_loss
from labkit.worker.measures.device_clock import DeviceClock
from labkit.worker.measures.samples import take_index
from labkit.worker.measures.step_loss import StepLoss
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
    """The iterator of a DataLoader."""

    def __init__(self):
        self._auto_collation, self._dataset_kind = True, 0


def fetch(probe, loader, samples):
    take_index(loader, range(samples))
    probe.after_fetch(0.0, loader, [torch.zeros(samples, 2)])


def step(probe, loader, optimizer, loss, samples=4):
    fetch(probe, loader, samples)
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
Probe(Path(tempfile.mkdtemp()) / "m").start(torch)
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


def test_the_modes_of_a_script_see_only_what_the_script_does():
    """In a process of its own: the hooks are on torch itself."""
    program = """
import tempfile, torch
from pathlib import Path
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from labkit.worker.probe import Probe

class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        seen.append(str(function))
        return function(*args, **(kwargs or {}))

class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        seen.append(str(operation))
        return operation(*args, **(kwargs or {}))

def train():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with Functions(), Operations():
            for _ in range(2):
                (model(torch.ones(1, 2)).sum() * 0.5).backward()
            optimizer.step()

seen = alone = []
train()
Probe(Path(tempfile.mkdtemp()) / "m").start(torch)
seen = []
train()
assert seen == alone, (alone, seen)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


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


def test_a_prefetched_batch_is_counted_with_the_backward_that_used_it(probe, tmp_path):
    (optimizer,), loss = made()
    loader = Loader()
    probe._due = 0.0
    sizes = [4, 4, 4, 2]
    fetch(probe, loader, sizes[0])
    for following in [*sizes[1:], None]:
        if following:
            fetch(probe, loader, following)
        else:
            probe.after_last_fetch(loader)
        probe.before_backward(loss)
        probe.after_backward(True)
        probe._due = 0.0
        probe.before_step(optimizer)
        probe.after_step(optimizer)
    counted = [r["samples"] for r in records(tmp_path) if r["k"] == "step"]
    assert counted == [None, 4, 4, 2]  # after the first step both batches might have been used


def test_a_loss_that_is_not_a_number_is_written_as_text(probe, tmp_path):
    (optimizer,), _ = made()
    probe._due = 0.0
    step(probe, Loader(), optimizer, torch.tensor(float("nan")))
    assert records(tmp_path)[-1]["loss"] == "nan"


def test_a_loss_is_recorded_as_it_was_at_backward(probe, tmp_path):
    (optimizer,), _ = made()
    loss = torch.tensor(2.5)
    fetch(probe, Loader(), 4)
    probe.before_backward(loss)
    probe.after_backward(True)
    loss.zero_()
    probe._due = 0.0
    probe.before_step(optimizer)
    probe.after_step(optimizer)
    assert records(tmp_path)[-1]["loss"] == 2.5


def test_steps_are_written_when_no_further_step_comes(probe, tmp_path):
    (optimizer,), loss = made()
    loader = Loader()
    probe._due = math.inf
    for _ in range(3):
        step(probe, loader, optimizer, loss)
    probe.tick()  # a step may still come to write them
    assert [r["k"] for r in records(tmp_path)] == ["model"]
    probe._due = 0.0
    probe.tick()
    probe.tick()
    line = records(tmp_path)[-1]
    assert [r["k"] for r in records(tmp_path)] == ["model", "step"]
    assert (line["step"], line["n"], line["samples"], line["loss"]) == (3, 3, 12, 2.5)

    time.sleep(0.01)
    step(probe, loader, optimizer, loss)
    last = records(tmp_path)[-1]
    assert (last["step"], last["n"], last["samples"], last["loss"]) == (4, 1, 4, 2.5)
    assert last["seconds"] == [pytest.approx(probe.latest_step_seconds)] * 3
    probe._due = 0.0
    probe.tick()
    probe.finish("finished")
    assert [r["k"] for r in records(tmp_path)] == ["model", "step", "step", "end"]


def test_a_step_of_unknown_samples_that_is_written_does_not_hide_those_of_the_next(probe, tmp_path):
    (optimizer,), loss = made()
    probe._due = math.inf
    for samples in (None, 4):
        if samples:
            fetch(probe, Loader(), samples)
        probe.before_backward(loss)
        probe.after_backward(True)
        probe.before_step(optimizer)
        probe.after_step(optimizer)
        probe._due = 0.0
        probe.tick()
        probe._due = math.inf
    probe.finish("finished")
    assert [r["samples"] for r in records(tmp_path) if r["k"] == "step"] == [None, 4]


def test_a_step_that_is_half_added_up_is_not_written(probe, tmp_path, monkeypatch):
    (optimizer,), loss = made()
    begin = probe._begin_step

    def begin_while_another_thread_writes(now):
        if probe._is_adding:
            probe._due = 0.0
            probe.tick()
            probe._due = math.inf
        begin(now)

    monkeypatch.setattr(probe, "_begin_step", begin_while_another_thread_writes)
    for _ in range(3):
        step(probe, Loader(), optimizer, loss)
    probe.finish("finished")
    (line,) = [r for r in records(tmp_path) if r["k"] == "step"]
    assert (line["step"], line["n"], line["samples"]) == (3, 3, 12)


def test_no_step_is_lost_or_doubled_when_two_threads_write(probe, tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.worker.probe.RECORD_SECONDS", -1.0)  # every record is due
    (optimizer,), loss = made()
    seconds = []
    loader, ended, record = Loader(), threading.Event(), probe._record

    def tick():
        while not ended.is_set():
            probe.tick()

    thread = threading.Thread(target=tick)
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for number in range(4000):
            probe._record = (lambda: None) if number % 10 else record  # a step that is not written
            step(probe, loader, optimizer, loss, samples=1 + number % 3)
            seconds.append(probe.latest_step_seconds)
            if number % 20 == 5:
                time.sleep(1e-4)
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(switching)
    probe.finish("finished")
    lines = [r for r in records(tmp_path) if r["k"] == "step"]
    steps = [line["step"] for line in lines]
    assert steps == sorted({*steps})
    assert [line["n"] for line in lines] == [b - a for a, b in pairwise([0, *steps])]
    assert [line["samples"] for line in lines] == [
        sum(1 + number % 3 for number in range(a, b)) for a, b in pairwise([0, *steps])
    ]
    assert sum(line["seconds"][0] for line in lines) == pytest.approx(sum(seconds))
    assert sum(step % 10 != 1 for step in steps) > 10  # the other thread wrote these


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
    probe._unfinished.flush()
    assert [r["k"] for r in records(tmp_path)] == ["model"]
    monkeypatch.setattr(MadeUpEvent, "done", True)
    probe._unfinished.flush()
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


def test_on_made_up_cuda_steps_are_told_of_before_the_device_has_finished_them(probe, tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.worker.probe.TELL_SECONDS", 0.0)
    probe._device_clock = lambda: DeviceClock(MadeUpTorch, "cuda:0")
    probe._memory = lambda: {"allocated": 7}
    (optimizer,), loss = made()
    loader = Loader()
    monkeypatch.setattr(MadeUpEvent, "done", False)
    probe._due = 0.0
    step(probe, loader, optimizer, loss)  # waits for the device
    probe._timed = probe._device_clock()
    probe._due = math.inf
    step(probe, loader, optimizer, loss)  # waits for another step
    monkeypatch.setattr(MadeUpEvent, "query", lambda event: pytest.fail("another thread than the training's asked"))
    for _ in range(2):
        probe._due = 0.0
        probe.tick()
    told = [r for r in records(tmp_path) if r["k"] == "step"]
    assert [(r["step"], r["n"], r["samples"]) for r in told] == [(1, 1, 4), (2, 1, 4)]
    assert not any(name in r for r in told for name in ("forward", "loss", "allocated"))

    monkeypatch.setattr(MadeUpEvent, "query", lambda event: True)
    probe._due = 0.0
    step(probe, loader, optimizer, loss)
    probe.finish("finished")
    first, second, third = [r for r in records(tmp_path) if r["k"] == "step"][2:]
    assert (first["step"], first["of"], first["loss"], first["allocated"]) == (1, 1, 2.5, 7)
    assert (second["step"], second["of"], second["forward"]) == (2, 1, pytest.approx(0.01))
    assert (third["step"], third["n"], third["samples"], third["loss"]) == (3, 1, 4, 2.5)
    assert "n" not in first and "loss" not in second

    history = RankHistory(0, tmp_path / "metrics.jsonl")
    history.read_all()
    assert (history.step, history.totals["steps"], history.totals["samples"]) == (3, 3, 12)
    assert history.totals["forward"] == pytest.approx(0.02)  # the first step had no events


def test_on_made_up_cuda_what_the_device_never_finishes_is_told_of_at_the_end(probe, tmp_path, monkeypatch):
    probe._device_clock = lambda: DeviceClock(MadeUpTorch, "cuda:0")
    monkeypatch.setattr(MadeUpEvent, "done", False)
    (optimizer,), loss = made()
    step(probe, Loader(), optimizer, loss)
    probe.finish("finished")
    line, end = records(tmp_path)[-2:]
    assert (line["k"], line["step"], line["n"]) == ("step", 1, 1)
    assert (end["step"], end["dropped"]) == (1, 1)


def test_on_made_up_cuda_a_record_that_ends_early_has_the_phases_of_its_first_step(probe, tmp_path):
    probe._device_clock = lambda: DeviceClock(MadeUpTorch, "cuda:0")
    (optimizer,), loss = made()
    probe._due = 0.0
    step(probe, Loader(), optimizer, loss)  # a record of its own; the next one begins
    for _ in range(3):
        probe._due = math.inf
        step(probe, Loader(), optimizer, loss)
    probe.after_evaluation_fetch(None, None)
    probe._unfinished.flush()
    line = records(tmp_path)[-1]
    assert (line["step"], line["n"]) == (4, 3)
    assert line["forward"] == line["backward"] == line["optimizer"] == pytest.approx(0.03)


def test_on_made_up_cuda_weights_are_read_once_for_each_line(monkeypatch):
    """Every tensor is on a GPU."""
    reads = []

    def number(value, on_device):
        if not isinstance(value, torch.Tensor):
            return value
        return value.clone() if on_device else None

    def read(value):
        if not isinstance(value, torch.Tensor):
            return value
        reads.append(value)
        return float(value)

    monkeypatch.setattr(step_loss, "_number", number)
    monkeypatch.setattr(step_loss, "_float", read)
    x = torch.randn(24, 4, requires_grad=True)
    losses = []
    for sizes in ((3, 9, 12), (8, 8, 8), (1, 11, 12)):
        step = StepLoss(alone=False)
        truth = 0.0
        for part in x.split(sizes):
            loss = part.square().mean() * (torch.tensor(len(part)) / 24)
            step.add(loss, None, in_step=False, gradient=None)
            truth += loss.item()
        losses.append((step.total(3, several_optimizers=False), (pytest.approx(truth), "sum of 3 micro-batches")))
        assert reads
        monkeypatch.setattr(step_loss, "_float", lambda value: pytest.fail("waited for the GPU again"))
    for recorded, expected in losses:
        assert recorded == expected


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


def test_on_made_up_cuda_a_loss_on_another_gpu_is_read_when_that_gpu_has_copied_it(monkeypatch):
    busy = {"stream of cuda:1"}
    monkeypatch.setattr(MadeUpEvent, "record", lambda event, stream: setattr(event, "stream", stream))
    monkeypatch.setattr(MadeUpEvent, "query", lambda event: event.stream not in busy)
    loss = SimpleNamespace(is_cuda=True, device="cuda:1", reshape=lambda shape: torch.tensor(2.5))
    loss.new_empty = lambda shape, device, pin_memory: torch.zeros(shape)
    clock = DeviceClock(MadeUpTorch, "cuda:0")
    clock.keep(loss)
    clock.begin()  # on the GPU of the parameters, which has nothing to do
    assert not clock.is_done
    busy.clear()
    assert clock.is_done
    assert clock.read(1) == {"loss": 2.5}


def test_a_step_in_a_simulated_thread_of_autograd_does_not_hide_that_the_training_waits_for_data(
    probe, tmp_path, monkeypatch
):
    """On CUDA, hooks of backward() run in such a thread. Here it is a thread of the test's."""
    (optimizer,), loss = made()
    loader, is_in_backward = Loader(), threading.local()
    monkeypatch.setattr("labkit.worker.probe.in_backward", lambda: hasattr(is_in_backward, "yes"))

    def step_in_backward():
        is_in_backward.yes = True
        probe.before_step(optimizer)
        probe.after_step(optimizer)

    for _ in range(3):
        probe._due = 0.0
        take_index(loader, range(4))
        probe.after_fetch(time.perf_counter() - 1.0, loader, [torch.zeros(4, 2)])
        probe.before_backward(loss)
        thread = threading.Thread(target=step_in_backward)
        thread.start()
        thread.join()
        probe.after_backward(True)
    probe.finish("finished")
    lines = [r for r in records(tmp_path) if r["k"] == "step"]
    assert [line["input"] for line in lines] == pytest.approx([1.0] * 3, abs=0.5)


def test_on_made_up_cuda_an_offloaded_optimizer_does_not_hide_the_gpu(probe, tmp_path, monkeypatch):
    cuda, card = torch.cuda, SimpleNamespace(total_memory=15 << 30, uuid="0a1b")
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda, "current_device", lambda: 1)
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(cuda, "memory_stats", lambda device: {"allocated_bytes.all.current": 7})
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda: 7)
    (optimizer,), loss = made()  # on the CPU
    optimizer.param_groups.insert(0, {"params": []})
    probe._due = math.inf
    step(probe, Loader(), optimizer, loss)

    model = records(tmp_path)[-1]
    assert (model["device"], model["limit"], model["uuid"]) == ("cuda:1", 15 << 30, "0a1b")
    assert probe._memory()["allocated"] == 7


def test_on_made_up_cuda_a_gpu_that_only_told_its_name_does_not_hide_a_training_on_the_cpu(
    probe, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    (optimizer,), loss = made()
    step(probe, Loader(), optimizer, loss)
    probe.finish("finished")
    model, line, _ = records(tmp_path)
    assert model["device"] == "cpu"
    assert line["rss"] > 0


def test_on_made_up_cuda_an_evaluation_does_not_double_the_phases_of_the_next_step(probe, tmp_path):
    probe._device_clock = lambda: DeviceClock(MadeUpTorch, "cuda:0")
    (optimizer,), loss = made()
    probe._due = float("inf")
    step(probe, Loader(), optimizer, loss)
    probe._timed = probe._device_clock()  # as when the next step is expected to be written
    probe.after_evaluation_fetch(None, None)
    probe._due = 0.0
    step(probe, Loader(), optimizer, loss)
    probe.finish("finished")
    first, second = (record for record in records(tmp_path) if record["k"] == "step")
    assert first["forward"] is None
    assert second["forward"] == second["backward"] == second["optimizer"] == pytest.approx(0.01)
