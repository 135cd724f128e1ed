# odd: the generator's step leaves unaveraged gradients in the discriminator, which are thrown away.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel as DDP


def real_batch(n=64):
    angle = torch.rand(n) * 2 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(n, 2)


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, o))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
generator, discriminator = DDP(mlp(8, 2)), DDP(mlp(2, 1))
torch.manual_seed(100 + rank)  # each rank draws data and noise of its own
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)

for step in range(50):
    with torch.no_grad():
        fake = generator.module(torch.randn(64, 8))
    logits = discriminator(torch.cat([real_batch(), fake]))
    loss_d = bce(logits, torch.cat([ones, zeros]))
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()

    loss_g = bce(discriminator.module(generator(torch.randn(64, 8))), ones)
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    if step % 10 == 0 and rank == 0:
        print(f"step {step}: D {loss_d.item():.3f} G {loss_g.item():.3f}")
dist.destroy_process_group()
