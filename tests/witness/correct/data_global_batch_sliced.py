# Every rank loads the same global batch (one seed, one order) and trains on its own slice of it: the loaders' batches
# are equal on all ranks, the samples that the model sees are not.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(320, 8)
data = TensorDataset(x, x.prod(1, keepdim=True))
loader = DataLoader(data, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))
model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(4):
    for a, b in loader:
        a, b = a[rank::world], b[rank::world]
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
