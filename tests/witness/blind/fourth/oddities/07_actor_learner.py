"""Right on purpose: actor-learner REINFORCE, only rank 0 has an optimizer and steps, while rank 1 only plays episodes with slightly stale weights it gets by broadcast every 4 updates."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical

CTX, ACTIONS, T = 6, 4, 64


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(CTX, 32), nn.Tanh())
        self.pi, self.v = nn.Linear(32, ACTIONS), nn.Linear(32, 1)

    def forward(self, s):
        h = self.body(s)
        return self.pi(h), self.v(h).squeeze(-1)


@torch.no_grad()
def play(policy, w, g):
    """A contextual bandit: reward 1 for the best arm of the context."""
    s = torch.randn(T, CTX, generator=g)
    logits, _ = policy(s)
    a = torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(1)
    logp = logits.log_softmax(-1).gather(1, a[:, None]).squeeze(1)
    r = ((s @ w).argmax(1) == a).float()
    return torch.cat([s, a[:, None].float(), logp[:, None], r[:, None]], 1)


def learn(policy, opt, roll):
    s, a, old, r = roll[:, :CTX], roll[:, CTX].long(), roll[:, CTX + 1], roll[:, CTX + 2]
    logits, v = policy(s)
    d = Categorical(logits=logits)
    rho = (d.log_prob(a) - old).exp().detach().clamp(max=1.5)   # V-trace like correction of staleness
    loss = -(rho * d.log_prob(a) * (r - v.detach())).mean() + 0.5 * (r - v).pow(2).mean() - 0.01 * d.entropy().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    policy = Policy()
    w = torch.randn(CTX, ACTIONS, generator=torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(20 + rank)
    opt = torch.optim.Adam(policy.parameters(), lr=1e-2) if rank == 0 else None
    rewards = []
    for update in range(100):
        if rank == 1:
            dist.send(play(policy, w, g), 0)
        else:
            roll = torch.empty(T, CTX + 3)
            dist.recv(roll, 1)
            learn(policy, opt, roll)
            rewards.append(roll[:, -1].mean().item())
        if update % 4 == 3:
            for p in policy.parameters():
                dist.broadcast(p.data, 0)
    if rank == 0:
        print(f"mean reward: first 10 updates {sum(rewards[:10]) / 10:.3f}, last 10 {sum(rewards[-10:]) / 10:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
