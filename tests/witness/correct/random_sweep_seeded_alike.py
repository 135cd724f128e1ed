# The learning rates of a sweep are compared from the same seed, each with a model and an optimizer of its own.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


dist.init_process_group("gloo")
torch.manual_seed(7)
data = TensorDataset(torch.randn(192, 8), torch.randn(192, 1))
for rate in (0.1, 0.03, 0.01, 0.003):
    torch.manual_seed(7)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for x, y in DataLoader(data, 16, sampler=DistributedSampler(data)):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
