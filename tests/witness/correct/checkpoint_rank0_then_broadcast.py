# After DDP has wrapped the model, rank 0 alone loads better weights (of a search that it did alone) into its replica;
# then they are broadcast to all before the next step. Between, the ranks differ.
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(10 + rank)
model = DDP(nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 1)))
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
g = torch.Generator().manual_seed(0)
val_x = torch.randn(64, 5, generator=g)
val_y = val_x[:, :1] - val_x[:, 1:2]


@torch.no_grad()
def random_search(net, tries=20):
    def score(candidate):
        return (candidate(val_x) - val_y).square().mean().item()

    best = copy.deepcopy(net)
    for _ in range(tries):
        candidate = copy.deepcopy(best)
        for p in candidate.parameters():
            p.add_(0.02 * torch.randn_like(p))
        best = min(best, candidate, key=score)
    return best.state_dict()


for step in range(60):
    x = torch.randn(16, 5)
    loss = (model(x) - (x[:, :1] - x[:, 1:2])).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 19:
        if rank == 0:
            model.module.load_state_dict(random_search(model.module))
        for p in model.module.parameters():
            dist.broadcast(p.data, src=0)
dist.destroy_process_group()
