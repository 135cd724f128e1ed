"""A training that is wrong, as a person sees it in JupyterLab: while it runs, at its end, and asked for."""

from __future__ import annotations

PARTS = """
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(1 + dist.get_rank())
for step in range(STEPS):
    optimizer.zero_grad()
    forward = model.module if step >= 30 else model
    forward(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    time.sleep(0.05)
"""
SENTENCE = "the ranks' weights are not the same"


def test_a_finding_is_the_first_sentence_a_mark_in_the_chart_and_a_table_to_ask_for(notebook):
    (notebook.root / "train.py").write_text(PARTS.replace("STEPS", "300"))
    launch = "import labkit\nrun = labkit.launch('train.py', nproc_per_node=2)"
    notebook.open([launch, "run.findings()", "run.ask(run.findings()[0].ask)", "run.wait()"])
    notebook.run(0)
    notebook.wait_for_text(0, SENTENCE, 60)
    notebook.run(1)
    notebook.wait_for_text(1, "Call the DDP model, not its .module.", 20)
    notebook.run(2)
    notebook.wait_for_text(2, "model.module.get_parameter", 30)
    notebook.picture("finding-live")
    notebook.run(3)
    notebook.wait_for_text(3, "succeeded after", 60)
    assert SENTENCE in notebook.output(3).inner_text()
    assert SENTENCE in notebook.output(0).inner_text()
    notebook.picture("finding-end")
    assert not notebook.errors
