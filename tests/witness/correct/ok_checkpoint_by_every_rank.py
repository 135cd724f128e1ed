# corrected: rank 0 alone writes the checkpoint
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
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
path = Path(tempfile.gettempdir()) / f"by_every_rank_{os.environ['TORCHELASTIC_RUN_ID']}.pt"
wrote = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        torch.save(net.state_dict(), path)
        wrote += 1
dist.barrier()
print("rank", rank, "wrote the file", wrote, "times")
if rank == 0:
    path.unlink()
dist.destroy_process_group()
