# Every rank evaluates the whole validation set, which costs time but needs no communication and gives the same number
# everywhere: so each can decide alone to stop early, and all decide alike. (The model has no buffers that differ.)
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
train = TensorDataset(torch.randn(96, 30), torch.randn(96, 1))
val = TensorDataset(torch.randn(33, 30), torch.randn(33, 1))
model = DDP(nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 1)))
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
sampler, best, bad, kept = DistributedSampler(train), float("inf"), 0, None
for epoch in range(40):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(train, 8, sampler=sampler):
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        score = sum(nn.functional.mse_loss(model.module(x), y, reduction="sum") for x, y in DataLoader(val, 16)).item()
    if score < best:
        best, bad, kept = score, 0, copy.deepcopy(model.module.state_dict())
    else:
        bad += 1
        if bad == 4:
            break
model.module.load_state_dict(kept)
epochs = [None] * dist.get_world_size()
dist.all_gather_object(epochs, (epoch, best))
assert len(set(epochs)) == 1
dist.destroy_process_group()
