# Steps are made in eval mode after rollouts without gradients, as is usual in fine-tuning by rewards, once a supervised
# training with dropout is over; a second model has BatchNorm that is frozen in both modes, and is validated often.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
policy = DDP(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 4)))
optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
torch.manual_seed(1 + rank)


def step(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


for _ in range(30):
    x = torch.randn(16, 8)
    step(nn.functional.cross_entropy(policy(x), x[:, :4].argmax(1)))
policy.eval()
for _ in range(12):
    x = torch.randn(32, 8)
    with torch.no_grad():
        actions = torch.distributions.Categorical(logits=policy(x)).sample()
    for _ in range(3):
        chosen = policy(x).log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
        step(-(chosen * (actions == x[:, :4].argmax(1)).float()).mean())

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32).eval(), nn.ReLU(), nn.Linear(32, 4))
net[1].train = lambda mode=True: net[1]
model = DDP(net)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
torch.manual_seed(1 + rank)
for epoch in range(6):
    model.train()
    for i in range(10):
        x = torch.randn(16, 8)
        step(nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)))
        if i == 3:
            model.eval()
            with torch.no_grad():
                model(x)
dist.destroy_process_group()
