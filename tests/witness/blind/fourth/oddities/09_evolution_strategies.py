"""Right on purpose: evolution strategies, no backward and no gradient at all, each rank scores its half of a seeded population and all apply the same update from the gathered scores."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

POP, SIGMA, LR = 32, 0.05, 0.08


def rollout(net, seed, steps=40):
    """Balance a noisy inverted pendulum, linearised: the return is minus the cost."""
    g = torch.Generator().manual_seed(seed)
    s = torch.randn(8, 2, generator=g) * 0.3
    cost = 0.0
    for _ in range(steps):
        u = net(s)[:, 0].tanh() * 3
        th, om = s[:, 0], s[:, 1]
        om = om + 0.05 * (2.0 * th.sin() + u) + 0.01 * torch.randn(8, generator=g)
        th = th + 0.05 * om
        s = torch.stack([th, om], 1)
        cost = cost + (th.pow(2) + 0.1 * om.pow(2) + 0.001 * u.pow(2)).clamp(max=10).mean()
    return -cost.item() / steps


def noise(gen, member, n):
    g = torch.Generator().manual_seed(100_000 * gen + member // 2)
    e = torch.randn(n, generator=g)
    return e if member % 2 == 0 else -e            # antithetic pairs


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).requires_grad_(False)
    theta = parameters_to_vector(net.parameters()).clone()
    opt_theta = nn.Parameter(theta)
    opt = torch.optim.Adam([opt_theta], lr=LR)
    history = []
    for gen in range(30):
        mine = torch.zeros(POP)
        for m in range(rank, POP, world):
            vector_to_parameters(opt_theta.data + SIGMA * noise(gen, m, theta.numel()), net.parameters())
            mine[m] = rollout(net, seed=gen)
        dist.all_reduce(mine)
        ranks = mine.argsort().argsort().float() / (POP - 1) - 0.5
        direction = sum(ranks[m] * noise(gen, m, theta.numel()) for m in range(POP)) / (POP * SIGMA)
        opt_theta.grad = -direction                # ascend the fitness
        opt.step()
        history.append(mine.mean().item())
    both = [torch.empty_like(theta) for _ in range(world)]
    dist.all_gather(both, opt_theta.detach())
    if rank == 0:
        print(f"mean return {history[0]:.3f} -> {history[-1]:.3f}, theta equal on both ranks: {torch.equal(*both)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
