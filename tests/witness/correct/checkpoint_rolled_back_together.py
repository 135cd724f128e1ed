# A loss that explodes is answered by all ranks together: they agree by an all_reduce, load the weights of before from
# memory, halve the lr and go on. So the weights jump back, everywhere in the same step.
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = DDP(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)))
opt = torch.optim.SGD(model.parameters(), lr=0.4)
good, rollbacks, typical = copy.deepcopy(model.state_dict()), 0, None
for step in range(80):
    x = torch.randn(16, 4) * (100.0 if step in (23, 51) and rank == 1 else 1.0)  # two broken batches
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    mean = loss.detach() / world
    dist.all_reduce(mean)
    if typical is not None and not mean < 20 * typical:
        model.load_state_dict(good)
        for group in opt.param_groups:
            group["lr"] /= 2
        rollbacks += 1
    else:
        typical = mean.item() if typical is None else max(0.9 * typical + 0.1 * mean.item(), 0.1)
        if step % 5 == 4:
            good = copy.deepcopy(model.state_dict())
assert rollbacks >= 2
dist.destroy_process_group()
