# ranks: 4
# Rank 0 learns, ranks 1 to 3 only act: they never step an optimizer and send their rollouts to rank 0, which
# alone calls irecv three times where each actor sends once. New weights are broadcast after every update.
import torch
import torch.distributed as dist
from torch import nn

LEARNER, ROLLOUT, STATE, ACTIONS = 0, 16, 6, 3


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATE, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, ACTIONS), nn.Linear(32, 1)

    def forward(self, state):
        hidden = self.body(state)
        return torch.distributions.Categorical(logits=self.policy(hidden)), self.value(hidden).squeeze(-1)


@torch.no_grad()
def act(policy, generator):
    states = torch.randn(ROLLOUT, STATE, generator=generator)
    actions = policy(states)[0].sample()
    rewards = (actions == states[:, :ACTIONS].argmax(1)).float()
    return torch.cat([states, actions[:, None].float(), rewards[:, None]], 1)


def learn(policy, optimizer, rollouts):
    states, actions, rewards = rollouts[:, :STATE], rollouts[:, STATE], rollouts[:, STATE + 1]
    choices, values = policy(states)
    advantage = rewards - values
    loss = -(choices.log_prob(actions) * advantage.detach()).mean() + 0.5 * advantage.square().mean()
    optimizer.zero_grad()
    (loss - 0.01 * choices.entropy().mean()).backward()
    optimizer.step()
    return rewards.mean().item()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
generator = torch.Generator().manual_seed(100 + rank)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), 1e-2) if rank == LEARNER else None
for update in range(60):
    for p in policy.parameters():
        dist.broadcast(p.data, LEARNER)
    if rank == LEARNER:
        parts = [torch.empty(ROLLOUT, STATE + 2) for _ in range(world - 1)]
        for request in [dist.irecv(part, src) for src, part in enumerate(parts, 1)]:
            request.wait()
        reward = learn(policy, optimizer, torch.cat(parts))
        if update % 20 == 0:
            print(update, reward)
    else:
        dist.send(act(policy, generator), LEARNER)
dist.destroy_process_group()
