"""The generator is updated only every fourth batch, the critic is switched off for it and its weights are clamped by hand: the original WGAN recipe."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def generator(z):
    return nn.Sequential(nn.Linear(z, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))


def critic():
    return nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))


def ring(n):
    g = torch.Generator().manual_seed(0)
    angle = torch.randint(0, 8, (n,), generator=g) * 0.785
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--z", type=int, default=8)
    ap.add_argument("--n-critic", type=int, default=4)
    ap.add_argument("--clamp", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    gen, cri = DDP(generator(args.z)), DDP(critic())
    opt_g = torch.optim.RMSprop(gen.parameters(), lr=1e-3)
    opt_c = torch.optim.RMSprop(cri.parameters(), lr=1e-3)
    data = TensorDataset(ring(960))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler, drop_last=True)
    torch.manual_seed(1 + rank)
    step = g_steps = 0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            step += 1
            cri.requires_grad_(True)
            with torch.no_grad():
                fake = gen(torch.randn(len(real), args.z))
            out = cri(torch.cat([real, fake]))
            loss_c = out[len(real):].mean() - out[:len(real)].mean()
            opt_c.zero_grad()
            loss_c.backward()
            opt_c.step()
            with torch.no_grad():
                for p in cri.parameters():
                    p.clamp_(-args.clamp, args.clamp)
            if step % args.n_critic == 0:
                cri.requires_grad_(False)
                loss_g = -cri.module(gen(torch.randn(len(real), args.z))).mean()
                opt_g.zero_grad()
                loss_g.backward()
                opt_g.step()
                g_steps += 1
        if rank == 0:
            print(f"epoch {epoch} critic steps {step} generator steps {g_steps} distance {-loss_c.item():.5f}")
    print(f"rank {rank} norms {gen.module[0].weight.norm().item():.6f} {cri.module[0].weight.norm().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
