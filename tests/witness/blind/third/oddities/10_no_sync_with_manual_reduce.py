"""All backward passes run in no_sync, also the last of each window: the gradients are averaged by hand in one flat all_reduce just before the step."""
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUM = 3


def reduce_gradients(params):
    grads = [p.grad for p in params if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for g, part in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(part.view_as(g))


def windows(loader, size):
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(6)
    x = torch.randn(700, 1, 32, generator=g).cumsum(-1)
    data = TensorDataset(x, (x[:, 0, -1] > x[:, 0, 0]).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    model = DDP(nn.Sequential(nn.Conv1d(1, 12, 5, stride=2), nn.ReLU(), nn.Conv1d(12, 12, 5, stride=2), nn.ReLU(),
                              nn.Flatten(), nn.Linear(60, 2)))
    params = list(model.parameters())
    opt = torch.optim.AdamW(params, lr=2e-3)
    steps = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for window in windows(loader, ACCUM):
            opt.zero_grad()
            with model.no_sync():
                for xb, yb in window:
                    loss = nn.functional.cross_entropy(model(xb), yb) / len(window)
                    loss.backward()
            reduce_gradients(params)
            nn.utils.clip_grad_norm_(params, 1.0)
            opt.step()
            steps += 1
        if dist.get_rank() == 0:
            print(f"epoch {epoch} steps {steps} loss {loss.item() * len(window):.4f}")
    print(f"rank {dist.get_rank()} weight sum {sum(p.double().sum().item() for p in params):.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
