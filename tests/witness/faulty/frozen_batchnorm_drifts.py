# fault: model.train() lets the BatchNorm of a frozen backbone go on: its statistics drift
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(3 * torch.randn(256, 16) + 1, torch.randn(256, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
backbone = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU())  # stands for a pretrained one
backbone.requires_grad_(False)
backbone.eval()
before = backbone[1].running_mean.clone()
net = nn.Sequential(backbone, nn.Linear(32, 1))
model = DDP(net)
optimizer = torch.optim.SGD(net[1].parameters(), lr=0.05)
for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print("rank", rank, "the frozen statistics moved by", (backbone[1].running_mean - before).norm().item())
dist.destroy_process_group()
