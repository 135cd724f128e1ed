# Five-fold cross-validation in one launch: five trainings one after the other, each with a new model and DDP. What one
# fold validates on, the other four train on, as it should be. The validation is split without padding.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.model_selection import KFold
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(0)
x = torch.randn(205, 8, generator=g)
data = TensorDataset(x, (x[:, 0] > 0).long())
scores = []
for fold, (train_ids, val_ids) in enumerate(KFold(5, shuffle=True, random_state=0).split(range(len(data)))):
    train, val = Subset(data, train_ids.tolist()), Subset(data, val_ids.tolist()[rank::world])
    torch.manual_seed(fold)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(train)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for a, b in DataLoader(train, 16, sampler=sampler):
            opt.zero_grad()
            F.cross_entropy(model(a), b).backward()
            opt.step()
    right = torch.zeros(1)
    with torch.no_grad():
        for a, b in DataLoader(val, 8):
            right += (model.module(a).argmax(1) == b).sum()
    dist.all_reduce(right)
    scores.append(right.item() / len(val_ids))
if rank == 0:
    print(scores)
dist.destroy_process_group()
