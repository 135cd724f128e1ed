# PPO: every rollout is learnt from four times, so each rank trains on the same samples repeatedly on purpose, and
# all ranks leave the epochs together when the averaged KL divergence is too large.
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Normal
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(17 + rank)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.zeros(2))

    def forward(self, s):
        return Normal(self.actor(s), self.log_std.exp()), self.critic(s).squeeze(-1)


net = DDP(ActorCritic())
opt = torch.optim.Adam(net.parameters(), 3e-3)
for iteration in range(12):
    with torch.no_grad():
        s = torch.randn(64, 4)
        pi, v = net.module(s)
        a = pi.sample()
        r = -(a - s[:, :2]).square().sum(1)
        old = pi.log_prob(a).sum(1)
        adv = r - v
        moments = torch.stack([adv.mean(), adv.square().mean()])
        dist.all_reduce(moments)
        mean, square = moments / world
        adv = (adv - mean) / (square - mean**2).clamp_min(1e-6).sqrt()
    for epoch in range(4):
        kl = 0.0
        for i in torch.randperm(64).split(16):
            pi, v = net(s[i])
            log = pi.log_prob(a[i]).sum(1)
            ratio = (log - old[i]).exp()
            clipped = torch.min(ratio * adv[i], ratio.clamp(0.8, 1.2) * adv[i]).mean()
            loss = -clipped + 0.5 * (r[i] - v).square().mean() * 0.1 - 0.001 * pi.entropy().mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
            kl += (old[i] - log).mean().item() / 4
        kl = torch.tensor(kl)
        dist.all_reduce(kl)
        if kl / world > 0.05:  # the same number on all ranks
            break
dist.destroy_process_group()
