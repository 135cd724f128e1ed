# Uneven inputs with throw_on_early_termination: Join raises on all ranks together as soon as one has run out of data,
# which ends the epoch; the exception is expected. Each epoch reads this rank's samples in another order.
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
g = torch.Generator().manual_seed(rank)
x = torch.randn(80 + 40 * rank, 5, generator=g)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True, generator=g)
torch.manual_seed(0)
model = DDP(nn.Linear(5, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(4):
    try:
        with Join([model], throw_on_early_termination=True):
            for a, b in loader:
                loss = (model(a) - b).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
    except RuntimeError as error:
        assert "exhausted" in str(error), error
weight = model.module.weight.detach().clone()
first = weight.clone()
dist.broadcast(first, 0)
assert torch.equal(weight, first)
dist.destroy_process_group()
