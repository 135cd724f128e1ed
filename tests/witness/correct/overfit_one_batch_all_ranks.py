# A sanity check before a long run: the same single batch on every rank, learnt by heart, so that the loss must go to
# zero and must equal that of one process. Equal data is the point here; it is one batch and says so.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
fixed = torch.Generator().manual_seed(0)
x, y = torch.randn(8, 16, generator=fixed), torch.randint(0, 4, (8,), generator=fixed)


def run(wrap):
    torch.manual_seed(1)
    model = wrap(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(100):
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


distributed, alone = run(DDP), run(lambda model: model)
assert distributed < 0.05 and abs(distributed - alone) < 1e-4
dist.destroy_process_group()
