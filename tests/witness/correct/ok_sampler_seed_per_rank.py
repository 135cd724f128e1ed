# corrected: all ranks give DistributedSampler the same seed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1), torch.arange(256))
sampler = DistributedSampler(data, seed=1234)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(3):
    sampler.set_epoch(epoch)
    seen = []
    for a, b, index in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += index.tolist()
every = [None, None]
dist.all_gather_object(every, seen)
if rank == 0:
    print("an epoch trained on", len(set(every[0] + every[1])), "different samples of 256")
dist.destroy_process_group()
