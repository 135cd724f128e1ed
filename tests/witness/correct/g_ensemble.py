# A model per rank, with a seed and an lr of its own, on all data: nothing has to be equal. No DDP.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))

torch.manual_seed(rank)  # a model per rank, on all data
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-3 * (rank + 1))
for epoch in range(3):
    for a, b in DataLoader(data, 16, shuffle=True):
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
out = model(data.tensors[0]).detach()
dist.all_reduce(out)
dist.destroy_process_group()
