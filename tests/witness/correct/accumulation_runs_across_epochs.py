# Accumulation by a counter that runs on over the epochs: an epoch has 10 batches and a window 4, so the third window
# begins in one epoch and ends in the next. Nothing is lost or added twice, and DDP averages in every pass.
import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE, STEPS = 4, 25
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(160, 9), torch.randn(160, 1))
model = DDP(nn.Linear(9, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05)


def forever(data):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


opt.zero_grad()
for micro, (x, y) in enumerate(itertools.islice(forever(data), ACCUMULATE * STEPS), 1):
    (F.mse_loss(model(x), y) / ACCUMULATE).backward()
    if micro % ACCUMULATE == 0:
        opt.step()
        opt.zero_grad()
dist.destroy_process_group()
