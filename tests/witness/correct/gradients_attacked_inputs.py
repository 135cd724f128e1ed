# Adversarial training. The attack's passes add to the model's gradients, which are cleared after them.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
own = torch.Generator().manual_seed(dist.get_rank())
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for _ in range(60):
    x = torch.randn(16, 16, generator=own)
    y = (x[:, 0] > 0).long()
    change = torch.zeros_like(x, requires_grad=True)
    for _ in range(3):  # the gradients of the last step are still there
        nn.functional.cross_entropy(model(x + change), y).backward()
        change = (change + 0.02 * change.grad.sign()).detach().clamp(-0.05, 0.05).requires_grad_()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x + change.detach()), y).backward()
    optimizer.step()
dist.destroy_process_group()
