# Momentum that is kept in the gradients themselves, which decay instead of being cleared, in several places.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
own = torch.Generator().manual_seed(dist.get_rank())


class Decaying(torch.optim.SGD):
    """Keeps its momentum in p.grad."""

    def step(self, closure=None):
        super().step(closure)
        torch._foreach_mul_([p.grad for group in self.param_groups for p in group["params"]], 0.9)


for decays in ("after", "before", "at once", "in the optimizer"):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = (Decaying if decays == "in the optimizer" else torch.optim.SGD)(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())
    for step in range(60):
        x = torch.randn(16, 16, generator=own)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        if decays == "before" and step:
            torch._foreach_mul_([p.grad for p in parameters], 0.9)
        loss.backward()
        if decays == "at once":
            torch._foreach_mul_([p.grad for p in parameters], 0.9)
        nn.utils.clip_grad_norm_(parameters, 10.0)
        optimizer.step()
        if decays == "after":
            for p in parameters:
                p.grad.data.mul_(0.9)
dist.destroy_process_group()
