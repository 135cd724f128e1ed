# fault: a resume reseeds the generators, so the first epoch's noise is drawn once more
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, i):
        return x[i], y[i], torch.randn(16)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x, y = torch.randn(256, 16), torch.randn(256, 1)
path = Path(tempfile.gettempdir()) / f"resume_random_{os.environ['TORCHELASTIC_RUN_ID']}_{rank}.pt"


def start():
    """What every start of the program does."""
    torch.manual_seed(1000 + rank)
    net = nn.Linear(16, 1)
    model = DDP(net)
    return net, model, torch.optim.SGD(model.parameters(), lr=0.05)


def epoch(number, model, optimizer):
    """Train for an epoch, and return its noise."""
    sampler = DistributedSampler(x)
    sampler.set_epoch(number)
    noises = []
    own = torch.Generator().manual_seed(number)  # the loader's, so that only the noise moves the default generator
    for a, b, noise in DataLoader(Noisy(), batch_size=16, sampler=sampler, generator=own):
        loss = F.mse_loss(model(a + 0.1 * noise), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        noises.append(noise)
    return torch.stack(noises)


net, model, optimizer = start()
first = epoch(0, model, optimizer)
torch.save({"model": net.state_dict(), "random": torch.get_rng_state()}, path)

# What a new process does to resume.
net, model, optimizer = start()
state = torch.load(path)
net.load_state_dict(state["model"])
second = epoch(1, model, optimizer)
print(
    "rank", rank, "batches with the first epoch's noise:", (first == second).all((1, 2)).sum().item(), "of", len(second)
)
path.unlink()
dist.destroy_process_group()
