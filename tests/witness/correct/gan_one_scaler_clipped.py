# A GAN with one GradScaler, whose two optimizers are unscaled and clipped at different times.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
own = torch.Generator().manual_seed(1 + dist.get_rank())
generator = DDP(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)))
critic = DDP(nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for _ in range(60):
    real = torch.randn(16, 2, generator=own) + 2
    fake = generator(torch.randn(16, 4, generator=own))
    opt_c.zero_grad()
    scores = critic(torch.cat([real, fake.detach()]))
    scaler.scale(nn.functional.softplus(-scores[:16]).mean() + nn.functional.softplus(scores[16:]).mean()).backward()
    scaler.unscale_(opt_c)
    nn.utils.clip_grad_norm_(critic.parameters(), 0.1)
    scaler.step(opt_c)

    opt_g.zero_grad()
    scaler.scale(nn.functional.softplus(-critic(fake)).mean()).backward()  # leaves gradients in the critic, too
    scaler.unscale_(opt_g)
    nn.utils.clip_grad_norm_([*generator.parameters(), *critic.parameters()], 0.1)
    scaler.step(opt_g)
    scaler.update()
dist.destroy_process_group()
