# torchmetrics gathers its own state when compute() is called, on all ranks; the validation is split without padding, so
# rank 0 has one sample more. Metrics of the training batches are a rank's own and are never reduced.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(0)
x = torch.randn(267, 9, generator=g)
data = TensorDataset(x, x.view(-1, 3, 3).sum(2).argmax(1))
train, val = random_split(data, [240, 27], generator=torch.Generator().manual_seed(1))
torch.manual_seed(rank)
model = DDP(nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3)))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
own = MulticlassAccuracy(3, average="micro", sync_on_compute=False)
everyone = MulticlassAccuracy(3, average="micro")
sampler = DistributedSampler(train)
for epoch in range(4):
    sampler.set_epoch(epoch)
    model.train()
    for a, b in DataLoader(train, 12, sampler=sampler):
        out = model(a)
        loss = nn.functional.cross_entropy(out, b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        own.update(out.detach(), b)
    model.eval()
    with torch.no_grad():
        for a, b in DataLoader(Subset(val, range(rank, len(val), world)), 8):
            everyone.update(model.module(a), b)
    print(rank, epoch, own.compute().item(), everyone.compute().item())
    own.reset()
    everyone.reset()
dist.destroy_process_group()
