"""What two ranks record is true of each of them, and every reader shows the same step."""

from __future__ import annotations

import json
import time

import pytest

import labkit
from labkit import words
from labkit.files import read_json
from labkit.record import RunReader

START = """
import json, os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
REDUCED_IN_PLACE = (
    START
    + """
losses = []
for _ in range(10):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    losses.append(loss.item())
    with torch.no_grad():
        dist.all_reduce(loss)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.11)
dist.destroy_process_group()
print(json.dumps(losses))
"""
)
SPREAD = (
    START
    + """
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
weight = torch.nn.Parameter(distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)]))
optimizer = torch.optim.SGD([weight], lr=0.01)
for _ in range(5):
    (weight * weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
)
FALLS_SILENT = (
    START
    + """
def train(steps):
    for _, batch in zip(range(steps), DataLoader(torch.randn(1000, 4), batch_size=7)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


train(20)
while rank == 1 and not os.path.exists("go on"):
    time.sleep(0.1)
train(5)
dist.destroy_process_group()
"""
)


def launched(tmp_path, monkeypatch, text, **options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    return labkit.launch("train.py", nproc_per_node=2, **options)


@pytest.mark.timeout(300)
def test_each_rank_has_its_own_loss_if_the_script_reduces_it_in_place(tmp_path, monkeypatch):
    run = launched(tmp_path, monkeypatch, REDUCED_IN_PLACE, wait=True)

    for rank, metrics in run.metrics().groupby("rank"):
        losses = json.loads(run.logs(rank=rank, stream="stdout").splitlines()[-1])
        assert metrics["loss"].notna().all()
        assert metrics["loss"].tolist() == pytest.approx([losses[step - 1] for step in metrics["step"]], rel=1e-5)


@pytest.mark.timeout(300)
def test_a_loss_of_which_each_rank_has_a_part_is_not_shown(tmp_path, monkeypatch):
    run = launched(tmp_path, monkeypatch, SPREAD, wait=True)

    metrics = run.metrics()
    assert metrics["loss"].isna().all()
    assert {*metrics["loss_of"]} == {"n/a: the loss is a DTensor of which each rank has a part"}


@pytest.mark.timeout(300)
def test_every_reader_shows_the_newest_step_of_ranks_that_fall_silent(tmp_path, monkeypatch):
    run = launched(tmp_path, monkeypatch, FALLS_SILENT, detach=True)
    reader = RunReader(run.folder)
    until(lambda: all(step_of_heartbeat(run, rank) == 20 for rank in (0, 1)))
    time.sleep(2.0)

    reader.poll()
    assert words.progress(reader, run.status()) == "step 20"
    metrics = run.metrics().groupby("rank")
    assert {*metrics["step"].max()} == {*metrics["steps"].sum()} == {20}
    assert {*metrics["samples"].sum()} == {140}
    until(lambda: run.status().notice)
    assert "step 20" in run.status().notice
    assert "rank 1, step 20" in str(run.stacks())

    (tmp_path / "go on").touch()
    run.wait()
    metrics = run.metrics().groupby("rank")
    assert {*metrics["step"].max()} == {*metrics["steps"].sum()} == {25}
    assert {*metrics["samples"].sum()} == {175}


def step_of_heartbeat(run, rank):
    return (read_json(run.folder.heartbeat(rank)) or {}).get("step")


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
