# fault: dcp.load is given a new optimizer itself, whose state has no places to load the moments into
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(192, 8), torch.randn(192, 1))
folder = Path(tempfile.gettempdir()) / f"moments_{os.environ['TORCHELASTIC_RUN_ID']}"


def fit(steps, *, resume):
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if resume:
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    loader = DataLoader(data, 16, sampler=DistributedSampler(data, shuffle=False))
    for x, y in list(loader)[:steps]:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if not resume:
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    return max(state["step"].item() for state in optimizer.state.values())


fit(4, resume=False)
steps = fit(2, resume=True)
print("the optimizer knows of", steps, "steps of 6")
dist.barrier()
if dist.get_rank() == 0:
    shutil.rmtree(folder)
dist.destroy_process_group()
