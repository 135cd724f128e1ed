"""Right on purpose: expert parallelism, each rank owns another expert, so these weights differ between ranks and aren't averaged, while tokens travel by all-to-all."""
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dfn
import torch.nn as nn
import torch.nn.functional as F


class EPMoE(nn.Module):
    """Top-1 routing with fixed capacity, one expert per rank."""

    def __init__(self, d, h):
        super().__init__()
        self.world = dist.get_world_size()
        self.router = nn.Linear(d, self.world)
        gen_state = torch.get_rng_state()
        torch.manual_seed(900 + dist.get_rank())
        self.expert = nn.Sequential(nn.Linear(d, h), nn.GELU(), nn.Linear(h, d))
        torch.set_rng_state(gen_state)

    def forward(self, x):
        n, d = x.shape
        p = self.router(x).softmax(-1)
        gate, dest = p.max(-1)
        cap = n  # enough room: nothing is dropped
        send = x.new_zeros(self.world, cap, d)
        slot = torch.stack([(dest == e).cumsum(0) - 1 for e in range(self.world)], 1).gather(1, dest[:, None])[:, 0]
        send = send.index_put((dest, slot), x)
        recv = torch.empty_like(send)
        recv = dfn.all_to_all_single(recv, send)
        out = self.expert(recv.flatten(0, 1)).view_as(recv)
        back = dfn.all_to_all_single(torch.empty_like(out), out)
        load = F.one_hot(dest, self.world).float().mean(0)
        return x + gate[:, None] * back[dest, slot], self.world * (load * p.mean(0)).sum()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moe, self.out = nn.Linear(10, 24), EPMoE(24, 48), nn.Linear(24, 1)

    def forward(self, x):
        h, aux = self.moe(torch.tanh(self.inp(x)))
        return self.out(h), aux


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Net()
    experts = list(net.moe.expert.parameters())
    ids = {id(p) for p in experts}
    dense = [p for p in net.parameters() if id(p) not in ids]
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(50 + rank)
    for step in range(80):
        x = torch.randn(64, 10, generator=g)
        y = torch.where(x[:, :1] > 0, x[:, 1:2] * x[:, 2:3], x[:, 3:4] - x[:, 4:5])
        pred, aux = net(x)
        loss = F.mse_loss(pred, y) + 0.01 * aux
        opt.zero_grad()
        loss.backward()
        for p in dense:
            dist.all_reduce(p.grad)
            p.grad /= world
        for p in experts:      # tokens of all ranks are already in this gradient
            p.grad /= world
        opt.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    d = torch.cat([p.detach().flatten() for p in dense])
    e = torch.cat([p.detach().flatten() for p in experts])
    ds, es = [torch.empty_like(d) for _ in range(2)], [torch.empty_like(e) for _ in range(2)]
    dist.all_gather(ds, d)
    dist.all_gather(es, e)
    if rank == 0:
        print("dense difference", (ds[0] - ds[1]).abs().max().item(), "experts differ (meant)", (es[0] - es[1]).abs().max().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
