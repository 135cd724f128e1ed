# fault: a schedule is planned for each batch, and moves once per accumulated step: half of it is never reached.
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 2


def decayed(step, *, num_training_steps):
    return 1 - 0.9 * step / num_training_steps


def train():
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))  # 16 batches
    model = DDP(nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    planned = len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(decayed, num_training_steps=planned))
    for number, (a, b) in enumerate(loader, 1):
        (nn.functional.mse_loss(model(a), b) / ACCUMULATE).backward()
        if number % ACCUMULATE == 0:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


dist.init_process_group("gloo")
train()
dist.destroy_process_group()
