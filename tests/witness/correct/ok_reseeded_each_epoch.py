# corrected: each epoch has a seed of its own
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


dist.init_process_group("gloo")
torch.manual_seed(7)
data = TensorDataset(torch.randn(192, 8), torch.randn(192, 1))
loader = DataLoader(data, 16, sampler=DistributedSampler(data))
net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(5):
    torch.manual_seed(7 + epoch)
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
