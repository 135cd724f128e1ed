"""All ranks draw the same noise from one reseeded generator and no backward is ever called: mirrored evolution strategies, where rank 1 evaluates the negated perturbation of rank 0."""
import torch
import torch.distributed as dist
from torch import nn

SIGMA, PAIRS, STEPS = 0.1, 8, 60


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1), nn.Tanh())

    def forward(self, s):
        return self.net(s)


@torch.no_grad()
def episode_return(policy, starts, horizon=25):
    """A cart on a track with a drift; the force should bring it to the origin and keep it there."""
    pos, vel = starts[:, 0].clone(), starts[:, 1].clone()
    drift, mass = starts[:, 2], 1 + 0.3 * starts[:, 3].tanh()
    cost = torch.zeros(len(starts))
    for _ in range(horizon):
        force = policy(torch.stack([pos, vel, drift, mass], 1)).squeeze(1)
        vel = 0.9 * vel + 0.3 * (force + 0.2 * drift) / mass
        pos = pos + 0.3 * vel
        cost += pos.abs() + 0.1 * force.abs()
    return -cost.mean()


def set_weights(policy, flat):
    nn.utils.vector_to_parameters(flat, policy.parameters())


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sign = 1.0 if rank % 2 == 0 else -1.0
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.03)
    start_pool = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
    for step in range(STEPS):
        g = torch.Generator().manual_seed(7000 + step)          # the same on every rank, so noise need not be sent
        starts = start_pool[torch.randint(0, 256, (32,), generator=g)]
        centre = nn.utils.parameters_to_vector(policy.parameters()).detach().clone()
        noise = torch.randn(PAIRS, centre.numel(), generator=g)
        scores = torch.empty(PAIRS)
        for k in range(PAIRS):
            set_weights(policy, centre + sign * SIGMA * noise[k])
            scores[k] = episode_return(policy, starts)
        set_weights(policy, centre)
        both = [torch.empty_like(scores) for _ in range(2)]
        dist.all_gather(both, scores)
        ascent = ((both[0] - both[1]).unsqueeze(1) * noise).mean(0) / (2 * SIGMA)
        optimizer.zero_grad()
        at = 0
        for p in policy.parameters():
            p.grad = -ascent[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        optimizer.step()
        if rank == 0 and step % 15 == 14:
            print(f"step {step + 1}: return {episode_return(policy, start_pool):.2f}")
    w = nn.utils.parameters_to_vector(policy.parameters()).detach()
    ref = w.clone()
    dist.broadcast(ref, src=0)
    print(f"rank {rank}: off rank 0 by {(w - ref).abs().max():.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
