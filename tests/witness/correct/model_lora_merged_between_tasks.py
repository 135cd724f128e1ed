# Low-rank adapters by parametrization; after the first task they are merged into the base (the base weights jump
# although no optimizer has them) and new ones are trained, in a new DDP.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parametrize


class LowRank(nn.Module):
    def __init__(self, out, n, r=2):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(r, n) / n**0.5), nn.Parameter(torch.zeros(out, r))

    def forward(self, weight):
        return weight + self.b @ self.a


def add_adapters(net):
    net.requires_grad_(False)
    for m in net.modules():
        if type(m) is nn.Linear:
            parametrize.register_parametrization(m, "weight", LowRank(*m.weight.shape))
    return net


def merge(net):
    for m in net.modules():
        if parametrize.is_parametrized(m):
            parametrize.remove_parametrizations(m, "weight", leave_parametrized=True)


def train(net, target, steps=30):
    model = DDP(net)
    opt = torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=1e-2, weight_decay=0)
    for _ in range(steps):
        x = torch.randn(16, 8)
        loss = (model(x) - target(x)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
for task in (lambda x: x[:, :1], lambda x: x[:, 1:2] - x[:, 2:3]):
    train(add_adapters(net), task)
    merge(net)
dist.destroy_process_group()
