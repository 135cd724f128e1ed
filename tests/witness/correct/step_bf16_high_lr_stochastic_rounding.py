# Pure bf16 weights with stochastic rounding: small updates are kept on average. The rounding noise comes from a
# generator that is equal on all ranks, so that the replicas stay bitwise equal.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class StochasticSGD(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.noise = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                exact = p.float() - group["lr"] * p.grad.float()
                bits = exact.view(torch.int32) + torch.randint(0, 1 << 16, p.shape, generator=self.noise).int()
                p.copy_((bits & -65536).view(torch.float32))


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).bfloat16())
opt = StochasticSGD(model.parameters(), lr=3e-3)
for step in range(80):
    x = torch.randn(32, 8)
    loss = (model(x.bfloat16()).float() - x[:, :1]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
sums = torch.stack([p.detach().float().sum() for p in model.parameters()])
first = sums.clone()
dist.broadcast(first, 0)
assert torch.equal(sums, first)
dist.destroy_process_group()
