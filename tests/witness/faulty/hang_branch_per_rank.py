# fault: ranks take different branches, so each leaves another layer without a gradient
# exit code: 1
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Linear(16, 16)
        self.image, self.text = torch.nn.Linear(16, 1), torch.nn.Linear(16, 1)

    def forward(self, x, kind):
        return (self.image if kind == "image" else self.text)(torch.relu(self.stem(x)))


dist.init_process_group("gloo", timeout=timedelta(seconds=15))
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(Router())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(20):
    kind = "text" if torch.rand(()) < 0.5 else "image"
    loss = model(torch.randn(8, 16), kind).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done")
dist.destroy_process_group()
