# fault: gradients are synchronised at the first micro-batch of each group of four rather than at the last, so that the step uses what each rank adds alone afterwards, and the replicas drift apart.
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUM = 4


def build_data(n=2048):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 20, generator=g)
    w = torch.randn(20, 1, generator=g)
    return TensorDataset(x, torch.tanh(x @ w) + 0.1 * torch.randn(n, 1, generator=g))


def train():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = build_data()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            sync = i % ACCUM == 0
            with contextlib.nullcontext() if sync else model.no_sync():
                loss = nn.functional.mse_loss(model(x), y) / ACCUM
                loss.backward()
            if (i + 1) % ACCUM == 0:
                opt.step()
                opt.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}, last loss {loss.item() * ACCUM:.4f}")
    dist.destroy_process_group()


train()
