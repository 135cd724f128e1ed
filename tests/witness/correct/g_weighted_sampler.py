# WeightedRandomSampler draws with replacement, seeded by rank: ranks may meet the same sample.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))

from torch.utils.data import WeightedRandomSampler

loader = DataLoader(
    data, 16, sampler=WeightedRandomSampler(torch.rand(512), 512, generator=torch.Generator().manual_seed(rank))
)
model = DDP(nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), 0.05)
for epoch in range(2):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
