"""The experts' weights differ between ranks and their gradients are never averaged: expert parallelism, one expert a rank; only the shared layers are synchronised."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        ctx.n = len(x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad[dist.get_rank() * ctx.n :][: ctx.n]


class ReturnTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        y = y.contiguous().clone()
        dist.all_reduce(y)
        n = len(y) // dist.get_world_size()
        return y[dist.get_rank() * n :][:n]

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class MoE(nn.Module):
    def __init__(self, d, shared_seed):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(shared_seed)
        self.router = nn.Linear(d, world)
        torch.manual_seed(shared_seed + 1 + rank)
        self.expert = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        gate = self.router(x).softmax(-1)
        weight, choice = gate.max(-1)
        tokens, choices = GatherTokens.apply(x), GatherTokens.apply(choice.float())
        mine = (choices == dist.get_rank()).unsqueeze(1)
        y = ReturnTokens.apply(torch.where(mine, self.expert(tokens), 0.0))
        return x + weight.unsqueeze(1) * y, gate.mean(0)


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    stem, head, moe = nn.Linear(16, 32), nn.Linear(32, 4), MoE(32, shared_seed=10)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(800, 16, generator=g)
    ds = TensorDataset(x, (x[:, 0] > 0).long() * 2 + (x[:, 1] * x[:, 2] > 0).long())
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 40, sampler=sampler, drop_last=True)
    shared = [*stem.parameters(), *head.parameters(), *moe.router.parameters()]
    opt = torch.optim.Adam([{"params": shared}, {"params": moe.expert.parameters(), "lr": 2e-3}], lr=3e-3)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            h, load = moe(stem(xb))
            loss = F.cross_entropy(head(h), yb) + 0.1 * (load * load).sum()
            opt.zero_grad()
            loss.backward()
            for p in shared:
                dist.all_reduce(p.grad)
                p.grad /= world
            for p in moe.expert.parameters():
                p.grad /= world              # the sum over all ranks' tokens is here already
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} load {load.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
