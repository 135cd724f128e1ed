# Every rank has an environment of its own, seeded by its rank, and there is no DataLoader: the inputs are what the
# policy meets. Episodes have different lengths, so the ranks call the environment (not the model) differently often.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Corridor:
    """Walk to the right end; an episode is over there or after 20 moves."""

    def __init__(self, seed):
        self.random = torch.Generator().manual_seed(seed)

    def reset(self):
        self.at, self.moves = int(torch.randint(0, 5, (), generator=self.random)), 0
        return self.observe()

    def observe(self):
        return torch.nn.functional.one_hot(torch.tensor(self.at), 8).float()

    def step(self, action):
        self.at, self.moves = max(0, min(7, self.at + (1 if action else -1))), self.moves + 1
        return self.observe(), -0.1 + (self.at == 7), self.at == 7 or self.moves == 20


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    env = Corridor(seed=dist.get_rank())
    policy = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    for _ in range(50):
        states, actions, rewards, done, state = [], [], [], False, env.reset()
        while not done:
            with torch.no_grad():  # acting goes past DDP: nothing is averaged here
                action = torch.distributions.Categorical(logits=policy.module(state)).sample()
            states.append(state)
            actions.append(action)
            state, reward, done = env.step(action.item())
            rewards.append(reward)
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        choices = torch.distributions.Categorical(logits=policy(torch.stack(states)))
        loss = -(choices.log_prob(torch.stack(actions)) * (returns - returns.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mine = nn.utils.parameters_to_vector(policy.parameters()).detach()
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(mine, first)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
