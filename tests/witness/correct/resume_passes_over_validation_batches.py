# The first four batches of each epoch are kept for a validation: a resume passes over them, too, in the next epoch.
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
data = TensorDataset(torch.randn(160, 8), torch.randn(160, 1))
folder = Path(tempfile.gettempdir()) / f"order_{os.environ['TORCHELASTIC_RUN_ID']}"
folder.mkdir(exist_ok=True)


def fit(epochs, state=None):
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    epoch = 0
    if state:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epoch = state["epoch"]
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, 8, sampler=sampler)
    while epoch < epochs:
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            if i < 4:  # of each epoch, for the validation
                continue
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0 and (epoch, i) == (1, 4):
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"epoch": 2, "batch": 0}, folder / "last.pt")
        epoch += 1


fit(2)
dist.barrier()
fit(3, torch.load(folder / "last.pt"))
dist.barrier()
if dist.get_rank() == 0:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
dist.destroy_process_group()
