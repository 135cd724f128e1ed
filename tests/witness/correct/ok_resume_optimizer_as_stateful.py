# corrected: get_state_dict makes the places for the moments, set_state_dict gives them to the optimizer
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
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
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loader = DataLoader(data, 16, sampler=DistributedSampler(data, shuffle=False))
    for x, y in list(loader)[:steps]:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if not resume:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    return max(state["step"].item() for state in optimizer.state.values())


fit(4, resume=False)
steps = fit(2, resume=True)
assert steps == 6
dist.barrier()
if dist.get_rank() == 0:
    shutil.rmtree(folder)
dist.destroy_process_group()
