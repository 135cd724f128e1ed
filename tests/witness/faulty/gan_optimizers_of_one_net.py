# fault: the discriminator's optimizer was given the generator's parameters, so that the discriminator never moves
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Z = 8


def make_g():
    return nn.Sequential(nn.Linear(Z, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 2))


def make_d():
    return nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def ring(n=1600):
    g = torch.Generator().manual_seed(0)
    k = torch.randint(0, 8, (n,), generator=g)
    a = 2 * torch.pi * k / 8
    return TensorDataset(torch.stack([a.cos(), a.sin()], 1) * 2 + 0.05 * torch.randn(n, 2, generator=g))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    netG, netD = DDP(make_g()), DDP(make_d())
    torch.manual_seed(100 + rank)  # different noise on each rank
    optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    ds = ring()
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=32, sampler=sampler, drop_last=True)
    d0 = [p.detach().clone() for p in netD.parameters()]

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            b = real.size(0)
            ones, zeros = torch.ones(b, 1), torch.zeros(b, 1)
            # --- D
            with torch.no_grad():
                fake = netG(torch.randn(b, Z))
            pred = netD(torch.cat([real, fake]))
            errD = bce(pred[:b], ones) + bce(pred[b:], zeros)
            netD.zero_grad()
            errD.backward()
            optD.step()
            # --- G
            errG = bce(netD(netG(torch.randn(b, Z))), ones)
            netG.zero_grad()
            errG.backward()
            optG.step()
        if rank == 0:
            print(f"[{epoch}] Loss_D {errD.item():.4f} Loss_G {errG.item():.4f}")

    moved = max((p - q).abs().max().item() for p, q in zip(netD.parameters(), d0, strict=True))
    if rank == 0:
        print("discriminator moved by (should be > 0):", moved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
