"""A project as somebody brings it to Kaggle: a script of their own, a package beside it, its data, and a notebook."""

from __future__ import annotations

from pathlib import Path

import nbformat

TRAIN = '''"""Fits a small network to data.csv with DDP."""

import csv
import os

import torch
import torch.distributed as dist
from mymodel import Net
from torch.nn.parallel import DistributedDataParallel as DDP

on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
with open("data.csv") as file:
    rows = torch.tensor([[float(value) for value in row.values()] for row in csv.DictReader(file)], device=device)
model = DDP(Net(2).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for batch in rows[dist.get_rank() :: dist.get_world_size()].split(4):
    loss = torch.nn.functional.mse_loss(model(batch[:, :2]), batch[:, 2:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, {len(rows)} rows")
dist.destroy_process_group()
'''
NET = """from torch import nn


class Net(nn.Sequential):
    def __init__(self, inputs):
        super().__init__(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, 1))
"""
FILES = {
    "train.py": TRAIN,
    "mymodel/__init__.py": "from .net import Net\n",
    "mymodel/net.py": NET,
    "data.csv": "a,b,target\n" + "".join(f"{i / 40},{i % 7},{i / 20}\n" for i in range(40)),
}
LAUNCH = 'import labkit\nrun = labkit.launch("train.py", nproc_per_node=2)'
SHOW = "run.wait()\nprint(run.status().state, run.logs(rank=0), run.logs(rank=1))"
SHOWN = ("succeeded", "rank 0 of 2, 40 rows", "rank 1 of 2, 40 rows")


def own_project(folder: Path) -> Path:
    """Write the project into a folder; its notebook."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return written(folder / "mine.ipynb", LAUNCH, SHOW)


def written(path: Path, *sources: str) -> Path:
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources]), path)
    return path


def shown_in(executed: Path) -> str:
    """What the cells of an executed notebook printed."""
    outputs = [output for cell in nbformat.read(executed, 4).cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)
