"""The example of docs/how_to/sweep.md with Optuna: real trials that succeed, diverge and fail."""

import re
from pathlib import Path

import pytest

import labkit

optuna = pytest.importorskip("optuna")

PAGE = (Path(__file__).parents[2] / "docs" / "how_to" / "sweep.md").read_text(encoding="utf-8")
TRAIN = """
import argparse, logging
import torch, torch.distributed as dist
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
lr = parser.parse_args().lr
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
for step in range(1, 41):
    x = torch.randn(64, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if step % 10 == 0:
        if lr == 0.02 and dist.get_rank() == 1:
            raise ValueError("a trial that fails")
        logging.getLogger("metrics").info({"val_loss": loss.item(), "step": step})
if lr > 1:
    import time
    time.sleep(60)
dist.destroy_process_group()
"""


def test_a_study_is_told_what_succeeded_diverged_and_failed(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n([^`]*import optuna\n.*?)```", PAGE, re.S)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    chosen = "for lr in (0.1, 9.0, 0.02):\n    study.enqueue_trial({'lr': lr})\n"
    names = {}
    exec(code.replace("for _ in range(20):", f"{chosen}for _ in range(3):"), names)

    trials = [(trial.params["lr"], trial.state.name) for trial in names["study"].trials]
    assert trials == [(0.1, "COMPLETE"), (9.0, "PRUNED"), (0.02, "FAIL")]
    assert 0 <= names["study"].best_value < 1
    assert [run.status().state for run in labkit.runs(tag="optuna")] == ["failed", "stopped", "succeeded"]
    assert "{'lr': 0.1}" in capsys.readouterr().out
