# corrected: a DistributedSampler splits the samples
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Waves(Dataset):
    def __len__(self):
        return 300

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(10, generator=g)
        return x, x.sin().sum(0, keepdim=True)


dist.init_process_group("gloo")
rank = dist.get_rank()
data = Waves()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=15, shuffle=sampler is None, sampler=sampler)
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1)))
torch.manual_seed(100 + rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
