"""FSDP2 with a home-made gradient clip on each rank's local shards, so each rank scales by another norm and one parameter's halves get different factors."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln = nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.ln(x))))


class Recommender(nn.Module):
    def __init__(self, users=100, items=60, d=24):
        super().__init__()
        self.u, self.i = nn.Embedding(users, d), nn.Embedding(items, d)
        self.blocks = nn.ModuleList(Block(2 * d) for _ in range(2))
        self.out = nn.Linear(2 * d, 1)

    def forward(self, u, i):
        x = torch.cat([self.u(u), self.i(i)], 1)
        for b in self.blocks:
            x = b(x)
        return self.out(x).squeeze(1)


def clip_gradients(model, max_norm):
    # clip_grad_norm_ is slow with many DTensors, do it by hand
    grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    norm = torch.sqrt(sum(g.pow(2).sum() for g in grads))
    coef = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(coef)
    return norm, coef


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Recommender()
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    g = torch.Generator().manual_seed(8)
    uf, vf = torch.randn(100, 4, generator=g), torch.randn(60, 4, generator=g)
    g.manual_seed(100 + rank)
    ratio = []
    for step in range(60):
        u = torch.randint(0, 100, (32,), generator=g)
        i = torch.randint(0, 60, (32,), generator=g)
        loss = F.mse_loss(model(u, i), (uf[u] * vf[i]).sum(1) + 2.0)
        opt.zero_grad()
        loss.backward()
        norm, coef = clip_gradients(model, max_norm=0.5)
        opt.step()
        coefs = [torch.zeros(()) for _ in range(world)]
        dist.all_gather(coefs, coef)
        ratio.append((max(coefs) / min(coefs)).item())
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f} grad norm {norm.item():.3f}")
    if rank == 0:
        print(f"ratio of the ranks' clip factors: mean {sum(ratio) / len(ratio):.3f} max {max(ratio):.3f} (should be 1)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
