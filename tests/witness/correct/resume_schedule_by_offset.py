# The schedule's state is saved, but not needed: a resumed training's schedule is a function of the epochs before it, too.
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(192, 8), torch.randn(192, 1))
path = Path(tempfile.gettempdir()) / f"rate_{os.environ['TORCHELASTIC_RUN_ID']}.pt"


def fit(first, last, state=None):
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if state:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    rates = [0.1, 0.1, 0.05, 0.05, 0.02, 0.02, 0.01, 0.01, 0.005, 0.005, 0.002]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: rates[epoch + first] / 0.1)
    loader = DataLoader(data, 16, sampler=DistributedSampler(data))
    for epoch in range(first, last):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
    optimizer.param_groups[0]["lr"] = rates[last - 1]  # what was in use when it is saved
    if dist.get_rank() == 0:
        states = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler}
        torch.save({name: each.state_dict() for name, each in states.items()}, path)
    dist.barrier()
    return optimizer.param_groups[0]["lr"]


fit(0, 6)
rate = fit(6, 10, torch.load(path))
if dist.get_rank() == 0:
    assert rate == 0.005
    path.unlink()
dist.destroy_process_group()
