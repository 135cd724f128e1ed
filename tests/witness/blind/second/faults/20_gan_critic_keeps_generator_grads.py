"""opt_d.zero_grad() comes right after the discriminator's step, so the gradients that the generator's backward leaves in D are still there and go into D's next update."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Ring(Dataset):
    """Eight Gaussians on a circle."""

    def __init__(self, n=960):
        g = torch.Generator().manual_seed(16)
        a = torch.randint(0, 8, (n,), generator=g) * 0.7854
        self.p = torch.stack([a.cos(), a.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)

    def __len__(self):
        return len(self.p)

    def __getitem__(self, i):
        return self.p[i]


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def grad_norm(net):
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    return nn.utils.get_total_norm(grads).item() if grads else 0.0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nz", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=40)
    opt = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    data = Ring()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=opt.batch, sampler=sampler, drop_last=True)
    netG, netD = DDP(mlp(opt.nz, 64, 64, 2)), DDP(mlp(2, 64, 64, 1))
    opt_d = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    bce = F.binary_cross_entropy_with_logits
    left = []
    for epoch in range(opt.epochs):
        sampler.set_epoch(epoch)
        for real in loader:
            n = len(real)
            # discriminator
            with torch.no_grad():
                fake = netG(torch.randn(n, opt.nz))
            left.append(grad_norm(netD))
            scores = netD(torch.cat([real, fake])).squeeze(1)
            target = torch.cat([torch.ones(n), torch.zeros(n)])
            loss_d = bce(scores, target)
            loss_d.backward()
            left[-1] /= grad_norm(netD)
            opt_d.step()
            opt_d.zero_grad()
            # generator
            loss_g = bce(netD(netG(torch.randn(n, opt.nz))).squeeze(1), torch.ones(n))
            loss_g.backward()
            opt_g.step()
            opt_g.zero_grad()
        if rank == 0:
            print(f"[{epoch + 1}/{opt.epochs}] loss_D {loss_d.item():.3f} loss_G {loss_g.item():.3f}")
    if rank == 0:
        stale = sum(v > 0 for v in left)
        print(f"D updates with the generator's gradient in them: {stale} of {len(left)}; its norm over the norm used, on average {sum(left) / len(left):.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
