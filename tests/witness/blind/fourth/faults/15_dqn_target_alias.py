"""DQN: the target network is the same object as the online network (no deepcopy), so the 'frozen' targets move at every step."""
import collections
import random
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Corridor:
    """Walk right for a reward at the end of the corridor."""

    def __init__(self, n, seed):
        self.n, self.rng = n, random.Random(seed)
        self.reset()

    def reset(self):
        self.pos, self.t = self.rng.randrange(self.n // 2), 0
        return self.obs()

    def obs(self):
        x = torch.zeros(self.n)
        x[self.pos] = 1.0
        return x

    def step(self, a):
        self.pos = max(0, min(self.n - 1, self.pos + (1 if a == 1 else -1)))
        self.t += 1
        win = self.pos == self.n - 1
        return self.obs(), (1.0 if win else -0.01), win or self.t >= 40


def soft_update(target, source, tau):
    with torch.no_grad():
        for t, s in zip(target.parameters(), source.parameters()):
            t.mul_(1 - tau).add_(tau * s)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    rng = random.Random(500 + rank)
    env = Corridor(12, seed=rank)
    policy_net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
    target_net = policy_net
    target_net.eval()
    q = DDP(policy_net)
    opt = torch.optim.Adam(q.parameters(), lr=1e-3)
    memory = collections.deque(maxlen=1000)
    obs, updates, returns, ret = env.reset(), 0, [], 0.0
    while updates < 80:
        eps = max(0.1, 1 - updates / 60)
        if rng.random() < eps:
            a = rng.randrange(2)
        else:
            with torch.no_grad():
                a = policy_net(obs).argmax().item()
        nxt, r, done = env.step(a)
        memory.append((obs, a, r, nxt, float(done)))
        ret += r
        obs = nxt
        if done:
            returns.append(ret)
            obs, ret = env.reset(), 0.0
        if len(memory) < 64:
            continue
        b = rng.sample(list(memory), 32)
        s, s2 = torch.stack([t[0] for t in b]), torch.stack([t[3] for t in b])
        act = torch.tensor([t[1] for t in b])
        rew, dn = torch.tensor([t[2] for t in b]), torch.tensor([t[4] for t in b])
        with torch.no_grad():
            y = rew + 0.97 * (1 - dn) * target_net(s2).max(1).values
        loss = F.smooth_l1_loss(q(s).gather(1, act[:, None]).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        soft_update(target_net, policy_net, tau=0.005)
        updates += 1
        if rank == 0 and updates % 20 == 0:
            print(f"update {updates} loss {loss.item():.4f} episodes {len(returns)}")
    d = max((a - b).abs().max().item() for a, b in zip(target_net.parameters(), policy_net.parameters()))
    if rank == 0:
        print("difference online - target net (should be > 0 with tau = 0.005):", d)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
