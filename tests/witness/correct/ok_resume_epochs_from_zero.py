# corrected: A resume with its schedule gives set_epoch the numbers of its epochs in the whole training.
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BEGINS = 3  # how many epochs there were when the resume's first one is numbered
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
path = Path(tempfile.gettempdir()) / f"epochs_{os.environ['TORCHELASTIC_RUN_ID']}.pt"


def fit(epochs, state=None, first=0, stops=None):
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    if state:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    sampler = DistributedSampler(data, seed=11)
    for epoch in range(epochs):
        sampler.set_epoch(first + epoch)
        for step, (x, y) in enumerate(DataLoader(data, 16, sampler=sampler)):
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if (epoch, step) == stops:
                if rank == 0:
                    states = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                    states |= {"scheduler": scheduler.state_dict(), "progress": {"epochs_run": epoch, "step": step}}
                    torch.save(states, path)
                dist.barrier()
                return


fit(3, stops=(2, 4))
fit(3, torch.load(path), first=BEGINS)
dist.barrier()
if rank == 0:
    path.unlink()
dist.destroy_process_group()
