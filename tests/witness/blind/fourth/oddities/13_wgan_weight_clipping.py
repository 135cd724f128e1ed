"""Right on purpose: WGAN with weight clipping, the critic's weights are cut to +-0.05 after each step, its loss is negative, and the generator steps once in five iterations only."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

Z, N_CRITIC, C = 6, 5, 0.05


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, o))


def real_batch(n, g):
    k = torch.randint(0, 4, (n,), generator=g)
    centres = torch.tensor([[1.5, 0.0], [-1.5, 0.0], [0.0, 1.5], [0.0, -1.5]])
    return centres[k] + 0.1 * torch.randn(n, 2, generator=g)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    gen, critic = DDP(mlp(Z, 2)), DDP(mlp(2, 1))
    opt_g = torch.optim.RMSprop(gen.parameters(), lr=5e-4)
    opt_c = torch.optim.RMSprop(critic.parameters(), lr=5e-4)
    g = torch.Generator().manual_seed(70 + rank)
    gen_steps = 0
    for it in range(250):
        x = real_batch(64, g)
        with torch.no_grad():
            fake = gen.module(torch.randn(64, Z, generator=g))
        out = critic(torch.cat([x, fake]))
        loss_c = out[64:].mean() - out[:64].mean()
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-C, C)
        if it % N_CRITIC == N_CRITIC - 1:
            critic.requires_grad_(False)             # only a signal for G now
            loss_g = -critic.module(gen(torch.randn(64, Z, generator=g))).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            critic.requires_grad_(True)
            gen_steps += 1
        if rank == 0 and it % 50 == 49:
            print(f"it {it + 1} critic {loss_c.item():+.4f} gen {loss_g.item():+.4f}")
    w = torch.cat([p.detach().flatten() for m in (gen, critic) for p in m.parameters()])
    both = [torch.empty_like(w) for _ in range(2)]
    dist.all_gather(both, w)
    at_edge = sum((p.abs() == C).sum().item() for p in critic.parameters())
    if rank == 0:
        print(f"generator steps {gen_steps} of 250, critic weights at the clip edge {at_edge}, equal: {torch.equal(*both)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
