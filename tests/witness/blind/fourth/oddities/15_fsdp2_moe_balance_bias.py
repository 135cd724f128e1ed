"""Right on purpose: aux-loss-free MoE balancing under FSDP2, the router's bias is a parameter without gradient, left out of sharding and of the optimizer, moved by hand by the sign of the load error."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class BalancedMoE(nn.Module):
    def __init__(self, d, h, n=4):
        super().__init__()
        self.n = n
        self.ln, self.gate = nn.LayerNorm(d), nn.Linear(d, n, bias=False)
        self.balance = nn.Parameter(torch.zeros(n), requires_grad=False)
        self.w1 = nn.Parameter(torch.randn(n, d, h) * d ** -0.5)
        self.w2 = nn.Parameter(torch.randn(n, h, d) * h ** -0.5)
        self.load = None

    def forward(self, x):
        y = self.ln(x)
        score = self.gate(y).sigmoid()
        pick = (score + self.balance).topk(2, -1).indices     # the bias only steers the choice
        w = torch.zeros_like(score).scatter(1, pick, score.gather(1, pick))
        self.load = (w > 0).float().sum(0).detach()
        h = F.gelu(torch.einsum("bd,ndh->bnh", y, self.w1))
        return x + torch.einsum("bnh,nhd,bn->bd", h, self.w2, w)

    @torch.no_grad()
    def rebalance(self, speed=0.02):
        load = self.load.clone()
        dist.all_reduce(load)
        self.balance += speed * torch.sign(load.mean() - load)
        return load


class Net(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.inp = nn.Linear(8, d)
        self.layers = nn.ModuleList(BalancedMoE(d, 32) for _ in range(2))
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        x = self.inp(x)
        for m in self.layers:
            x = m(x)
        return self.out(x)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    net = Net()
    ignored = {m.balance for m in net.layers}
    for m in net.layers:
        fully_shard(m, mesh=mesh, ignored_params={m.balance})
    fully_shard(net, mesh=mesh, ignored_params=ignored)
    opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=3e-3)
    g = torch.Generator().manual_seed(80 + rank)
    first = None
    for step in range(60):
        x = torch.randn(64, 8, generator=g) + 0.5
        y = (x[:, :1] * x[:, 1:2]).tanh() + x[:, 2:3].abs()
        loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        loads = [m.rebalance() for m in net.layers]
        first = loads if first is None else first
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} load {loads[0].int().tolist()}")
    b = torch.cat([m.balance for m in net.layers]).detach()
    both = [torch.empty_like(b) for _ in range(2)]
    dist.all_gather(both, b)
    if rank == 0:
        print(f"load {first[0].int().tolist()} -> {loads[0].int().tolist()}, bias equal on both ranks: {torch.equal(*both)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
