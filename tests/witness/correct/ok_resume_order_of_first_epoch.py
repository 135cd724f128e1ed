# corrected: the epoch is set at its beginning
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


def fit(epochs, state=None, stop_after=None):
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    epoch, skip = 0, 0
    if state:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epoch, skip = state["epoch"], state["batch"]
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, 8, sampler=sampler)
    while epoch < epochs:
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            if i < skip:
                continue
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0 and i % 3 == 2:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"epoch": epoch, "batch": i + 1}, folder / f"{epoch}-{i + 1}.new")
                (folder / f"{epoch}-{i + 1}.new").rename(folder / f"{epoch}-{i + 1}.pt")
            if (epoch, i + 1) == stop_after:
                return
        epoch, skip = epoch + 1, 0


fit(3, stop_after=(2, 6))
dist.barrier()
fit(3, torch.load(folder / "2-6.pt"))
dist.barrier()
if dist.get_rank() == 0:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
dist.destroy_process_group()
