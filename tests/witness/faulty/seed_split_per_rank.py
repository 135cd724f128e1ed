# fault: random_split draws from a per-rank seed, so one rank trains on another's validation samples
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1234 + rank)  # so that augmentations differ
x = torch.arange(400.0).reshape(400, 1) / 400
dataset = TensorDataset(x, torch.sin(6 * x), torch.arange(400))
train, val = random_split(dataset, [320, 80])
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=16, sampler=sampler)
val_loader = DataLoader(val, batch_size=16, sampler=DistributedSampler(val, shuffle=False))
model = DDP(torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b, _ in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        total = torch.tensor([F.mse_loss(model(a), b).item() for a, b, _ in val_loader]).mean()
    dist.all_reduce(total)
    if rank == 0:
        print("val", (total / dist.get_world_size()).item())
ids = [None, None]
dist.all_gather_object(ids, (sorted(train.indices), sorted(val.indices)))
if rank == 0:
    print("val samples of rank 0 trained on by rank 1:", len(set(ids[0][1]) & set(ids[1][0])), "of 80")
dist.destroy_process_group()
