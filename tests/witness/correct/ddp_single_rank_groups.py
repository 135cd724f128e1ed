# Each rank wraps a model of its own in a DDP over a group of itself only (as a script does that always uses DDP): the
# seeds, the lr and the number of steps differ, so nothing has to be equal.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
alone = [dist.new_group([r]) for r in range(world)][rank]
torch.manual_seed(rank)
model = DDP(nn.Sequential(nn.Linear(5, 10 + 2 * rank), nn.ReLU(), nn.Linear(10 + 2 * rank, 1)), process_group=alone)
opt = torch.optim.Adam(model.parameters(), lr=1e-2 / (rank + 1))
for step in range(40 + 10 * rank):
    x = torch.randn(16, 5)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
losses = [None] * world
dist.all_gather_object(losses, loss.item())
print(losses)
dist.destroy_process_group()
