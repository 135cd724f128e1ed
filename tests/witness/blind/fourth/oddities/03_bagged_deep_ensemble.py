"""Right on purpose: a bagged deep ensemble, each rank trains its own member on its own bootstrap, never averages weights, and only the predictions are averaged at the end."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Member(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))

    def forward(self, x):
        mu, raw = self.net(x).chunk(2, 1)
        return mu, F.softplus(raw) + 1e-3


def nll(mu, var, y):
    return (0.5 * var.log() + 0.5 * (y - mu).pow(2) / var).mean()


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 4, generator=g) * 4 - 2
    return x, x[:, :1].sin() + 0.3 * x[:, 1:2] + 0.1 * torch.randn(n, 1, generator=g)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10 * rank + 1)              # members must differ
    model = Member()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    x, y = data(600, seed=0)
    boot = torch.randint(0, len(x), (len(x),))    # bootstrap of the full set
    x, y = x[boot], y[boot]
    for epoch in range(4):
        for idx in torch.randperm(len(x)).split(40):
            loss = nll(*model(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"[member {rank}] epoch {epoch} nll {loss.item():.3f}")
    xt, yt = data(200, seed=1)
    with torch.no_grad():
        mu, var = model(xt)
    mus, vars_ = [torch.empty_like(mu) for _ in range(world)], [torch.empty_like(var) for _ in range(world)]
    dist.all_gather(mus, mu)
    dist.all_gather(vars_, var)
    m = torch.stack(mus).mean(0)
    v = (torch.stack(vars_) + torch.stack(mus).pow(2)).mean(0) - m.pow(2)
    if rank == 0:
        single = [nll(a, b, yt).item() for a, b in zip(mus, vars_)]
        print(f"test nll of the members {single[0]:.3f} {single[1]:.3f}, of the ensemble {nll(m, v, yt).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
