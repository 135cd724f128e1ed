# WGAN-GP with two critics and n_critic = 3: the critics step three times as often as the generator, the gradient
# penalty needs autograd.grad with create_graph, and the generator's loss goes through the critics unwrapped.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

N_CRITIC = 3


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def penalty(critic, real, fake):
    mix = torch.rand(len(real), 1)
    x = (mix * real + (1 - mix) * fake).requires_grad_()
    (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (grad.norm(2, dim=1) - 1).square().mean()


dist.init_process_group("gloo")
rank = dist.get_rank()
data = TensorDataset(torch.randn(480, 4, generator=torch.Generator().manual_seed(1)) + 2)
torch.manual_seed(rank)
generator = DDP(mlp(8, 32, 4))
critics = [DDP(mlp(4, 32, 1)) for _ in range(2)]
opt_g = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.0, 0.9))
opts_c = [torch.optim.Adam(c.parameters(), 1e-3, betas=(0.0, 0.9)) for c in critics]
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for i, (real,) in enumerate(loader):
        with torch.no_grad():
            fake = generator(torch.randn(len(real), 8))
        for critic, opt in zip(critics, opts_c, strict=True):
            loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, real, fake)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if (i + 1) % N_CRITIC == 0:
            for critic in critics:
                critic.requires_grad_(False)
            fake = generator(torch.randn(len(real), 8))
            opt_g.zero_grad()
            (-sum(c.module(fake).mean() for c in critics)).backward()
            opt_g.step()
            for critic in critics:
                critic.requires_grad_(True)
mine = torch.cat([p.detach().flatten() for m in (generator, *critics) for p in m.parameters()])
first = mine.clone()
dist.broadcast(first, 0)
assert torch.equal(mine, first)
dist.destroy_process_group()
