# fault: the generator's gradients are cleared twice and the critic's never, although they are clipped
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
own = torch.Generator().manual_seed(1 + dist.get_rank())
generator = DDP(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)))
critic = DDP(nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
opt_g = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
opt_c = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
for _ in range(60):
    real = torch.randn(16, 2, generator=own) + 2
    opt_g.zero_grad()  # meant: opt_c
    fake = generator(torch.randn(16, 4, generator=own)).detach()
    (critic(fake).mean() - critic(real).mean()).backward()
    nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
    opt_c.step()
    opt_g.zero_grad()
    (-critic(generator(torch.randn(16, 4, generator=own))).mean()).backward()
    opt_g.step()
print("rank", dist.get_rank(), "a critic's gradient", next(critic.parameters()).grad.norm().item())
dist.destroy_process_group()
