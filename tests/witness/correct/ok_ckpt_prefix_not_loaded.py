# corrected: the checkpoint is saved from the unwrapped module, so all of its keys are loaded
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
path = Path(tempfile.gettempdir()) / f"pretrained_{os.environ['TORCHELASTIC_RUN_ID']}.pt"
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
model = DDP(net)
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if rank == 0:
    torch.save(model.module.state_dict(), path)
dist.barrier()
# second stage: fine-tune from the checkpoint
torch.manual_seed(1)
net2 = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
net2.load_state_dict(torch.load(path, map_location="cpu", weights_only=True), strict=False)
print("rank", rank, "same weights as saved:", torch.equal(net2[0].weight, net[0].weight))
model2 = DDP(net2)
optimizer = torch.optim.SGD(model2.parameters(), lr=0.05)
for a, b in loader:
    loss = F.mse_loss(model2(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.barrier()
if rank == 0:
    path.unlink()
dist.destroy_process_group()
