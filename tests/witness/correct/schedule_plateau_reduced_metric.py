# ReduceLROnPlateau with a metric that is averaged over all ranks first, exactly: sums and counts over a validation
# set that is split without padding, so the ranks evaluate a different number of samples (11 and 10).
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
train = TensorDataset(torch.randn(160, 8), torch.randn(160, 1))
val = TensorDataset(torch.randn(21, 8), torch.randn(21, 1))
model = DDP(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
opt = torch.optim.Adam(model.parameters(), 1e-2)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
sampler = DistributedSampler(train)
loader = DataLoader(train, 16, sampler=sampler)
val_loader = DataLoader(Subset(val, range(rank, len(val), world)), 4)


def validate():
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in val_loader:
            total += torch.tensor([F.mse_loss(model.module(x), y, reduction="sum").item(), len(y)])
    model.train()
    dist.all_reduce(total)
    assert total[1] == len(val)
    return (total[0] / total[1]).item()


for epoch in range(10):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    plateau.step(validate())
rates = [torch.zeros(1) for _ in range(world)]
dist.all_gather(rates, torch.tensor([opt.param_groups[0]["lr"]]))
assert rates[0] == rates[1] < 1e-2
dist.destroy_process_group()
