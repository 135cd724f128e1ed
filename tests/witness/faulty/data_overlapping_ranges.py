# fault: train and validation are ranges of one data set that overlap by a fault of arithmetic
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Squares(Dataset):
    def __len__(self):
        return 500

    def __getitem__(self, i):
        x = torch.tensor([i / 500])
        return x, x.square()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data = Squares()
held = int(0.2 * len(data))
train = Subset(data, range(len(data) - held // 2))
val = Subset(data, range(len(data) - held, len(data)))
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=15, sampler=sampler)
val_loader = DataLoader(val, batch_size=10, sampler=range(rank, len(val), world))
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    errors = []
    for x, y in val_loader:
        with torch.no_grad():
            errors.append(F.mse_loss(model.module(x), y))
    model.train()
    total = torch.stack(errors).mean()
    dist.all_reduce(total)
dist.destroy_process_group()
