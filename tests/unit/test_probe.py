"""The probe on its step path. CUDA cannot be had here: its events, copies and clock are made up and say so."""

from __future__ import annotations

import json
import os

import pytest
import torch

from labkit.worker.device_clock import DeviceClock
from labkit.worker.probe import Probe


class MadeUpEvent:
    """Each recorded event is ten milliseconds later on the device than the one before."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        MadeUpEvent.now += 10.0
        self.at = MadeUpEvent.now

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return later.at - self.at


class MadeUpTorch:
    class cuda:
        Event = MadeUpEvent


@pytest.fixture
def probe(tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setitem(os.environ, name, "0")
    return Probe(tmp_path / "metrics.jsonl")


def records(tmp_path):
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


class Loader:
    pass


def step(probe, loader, optimizer, loss, samples=4):
    probe._after_fetch(0.0, loader, [torch.zeros(samples, 2)])
    if probe._timed is not None:
        probe._timed.end("forward")
    probe._after_backward(0.0, loss)
    probe._before_step(optimizer)
    probe._after_step(optimizer)


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
    assert model == {"t": model["t"], "k": "model", "parameters": 12, "gradients": 0, "optimizer": 0}
    assert (end["outcome"], end["step"], end["dropped"]) == ("finished", 5, 0)


def test_a_second_optimizer_is_part_of_the_same_step(probe):
    (first, second), loss = made(2)
    for _ in range(3):
        step(probe, Loader(), first, loss)
        probe._before_step(second)
        probe._after_step(second)
    assert probe.step == 3


def test_an_optimizer_that_steps_another_inside_counts_once(probe):
    (outer, inner), loss = made(2)
    for _ in range(3):
        probe._before_step(outer)
        probe._before_step(inner)
        probe._after_step(inner)
        probe._after_step(outer)
    assert probe.step == 3


def test_a_step_that_raised_does_not_end_the_counting(probe):
    (optimizer,), loss = made()
    probe._before_step(optimizer)
    step(probe, Loader(), optimizer, loss)
    step(probe, Loader(), optimizer, loss)
    assert probe.step == 2


def test_a_prefetched_batch_is_counted_with_the_backward_that_used_it(probe, tmp_path):
    (optimizer,), loss = made()
    loader = Loader()
    sizes = [4, 4, 2]
    probe._after_fetch(0.0, loader, [torch.zeros(sizes[0], 2)])
    for following in [*sizes[1:], None]:
        if following:
            probe._after_fetch(0.0, loader, [torch.zeros(following, 2)])
        probe._after_backward(0.0, loss)
        probe._before_step(optimizer)
        probe._after_step(optimizer)
    probe.finish("finished")
    assert sum(r["samples"] for r in records(tmp_path) if r["k"] == "step") == sum(sizes)


def test_a_loss_that_is_not_a_number_is_written_as_text(probe, tmp_path):
    (optimizer,), _ = made()
    probe._due = 0.0
    step(probe, Loader(), optimizer, torch.tensor(float("nan")))
    assert records(tmp_path)[0]["loss"] == "nan"


def test_a_full_disk_costs_records_and_nothing_else(probe, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    (optimizer,), loss = made()
    for _ in range(3):
        probe._due = 0.0
        step(probe, Loader(), optimizer, loss)
    assert probe.step == 3
    assert probe.recorder.dropped >= 3
    assert capsys.readouterr().err.count("labkit:") == 1


def test_the_device_clock_adds_up_phases_with_made_up_cuda_events():
    clock = DeviceClock(MadeUpTorch)
    for _ in range(2):
        clock.begin()
        clock.end("forward")
        clock.end("backward")
    clock.begin()
    clock.end("optimizer")
    assert clock.seconds() == pytest.approx({"forward": 0.02, "backward": 0.02, "optimizer": 0.01})


def test_on_made_up_cuda_a_record_waits_for_the_device_and_speaks_of_all_its_steps(probe, tmp_path):
    probe._device_clock = lambda: DeviceClock(MadeUpTorch)
    (optimizer,), loss = made()
    loader = Loader()
    probe._latest = 0.0
    step(probe, loader, optimizer, loss)
    probe._due = 0.0
    probe._timed = probe._device_clock()
    step(probe, loader, optimizer, loss)
    assert [r["k"] for r in records(tmp_path)] == ["model"]
    probe._flush()
    line = records(tmp_path)[-1]
    assert (line["step"], line["n"], line["loss"]) == (2, 2, 2.5)
    assert line["forward"] == line["backward"] == line["optimizer"] == pytest.approx(0.02)
