# Off-policy RL with three optimizers: the critic gets gradients from the actor's loss that nobody steps (they are
# cleared before its own backward), the target critic moves by Polyak averaging without any optimizer, and the
# temperature is a single parameter outside DDP whose gradient is averaged by hand. Replay draws with replacement.
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
actor = DDP(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 2)))
critic = DDP(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)))
target = copy.deepcopy(critic.module).requires_grad_(False)
log_alpha = torch.zeros((), requires_grad=True)
actor_opt = torch.optim.Adam(actor.parameters(), 3e-3)
critic_opt = torch.optim.Adam(critic.parameters(), 3e-3)
alpha_opt = torch.optim.Adam([log_alpha], 3e-3)


def choose(policy, state):
    mean, log_std = policy(state).chunk(2, -1)
    noise = torch.randn_like(mean)
    log_std = log_std.clamp(-5, 2)
    action = mean + noise * log_std.exp()
    return action.tanh(), (-0.5 * noise.square() - log_std - (1 - action.tanh().square() + 1e-6).log())


replay = []
for step in range(60):
    with torch.no_grad():
        s = torch.randn(8, 3)
        a, _ = choose(actor.module, s)
        replay.append((s, a, -(a - s[:, :1]).square(), torch.randn(8, 3)))
    s, a, r, s2 = (torch.cat(x) for x in zip(*(replay[i] for i in torch.randint(len(replay), (4,))), strict=True))
    with torch.no_grad():
        a2, log2 = choose(actor.module, s2)
        goal = r + 0.9 * (target(torch.cat([s2, a2], 1)) - log_alpha.exp() * log2)
    critic_opt.zero_grad()
    F.mse_loss(critic(torch.cat([s, a], 1)), goal).backward()
    critic_opt.step()

    a, log = choose(actor, s)
    actor_opt.zero_grad()
    (log_alpha.exp().detach() * log - critic.module(torch.cat([s, a], 1))).mean().backward()
    actor_opt.step()

    alpha_opt.zero_grad()
    (-log_alpha * (log.detach() - 1.0)).mean().backward()
    dist.all_reduce(log_alpha.grad)
    log_alpha.grad /= world
    alpha_opt.step()
    with torch.no_grad():
        for t, p in zip(target.parameters(), critic.parameters(), strict=True):
            t.lerp_(p, 0.05)
mine = torch.cat([p.detach().flatten() for m in (actor, critic, target) for p in m.parameters()] + [log_alpha.detach()[None]])
everyone = [torch.empty_like(mine) for _ in range(world)]
dist.all_gather(everyone, mine)
assert all(torch.equal(mine, other) for other in everyone)
dist.destroy_process_group()
