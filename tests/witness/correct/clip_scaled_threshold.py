# A threshold that is multiplied by the loss scale clips scaled gradients as its unscaled one would unscaled.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(320, 16)
data = TensorDataset(x, 4 * x.sum(1, keepdim=True))
sampler = DistributedSampler(data)
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", growth_interval=15)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, batch_size=8, sampler=sampler):
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 0.1 * scaler.get_scale())
        clip_grad_value_(model.parameters(), 0.05 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
dist.destroy_process_group()
