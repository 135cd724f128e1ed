"""Gradients are never reduced and the ranks' weights differ between steps: local SGD, which averages the weights every 8 steps and at the end."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def average_weights(model):
    flat = nn.utils.parameters_to_vector(model.parameters())
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / dist.get_world_size(), model.parameters())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--local-steps", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(4)
    x = torch.randn(640, 30, generator=g)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
            step += 1
            if step % args.local_steps == 0:
                average_weights(model)
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
    average_weights(model)
    print(f"rank {rank} final weight norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
