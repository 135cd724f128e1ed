# Progressive unfreezing: from the head down, one layer more per stage. Each stage unfreezes first and then wraps the
# model in a new DDP with a new optimizer, so the newly trained layers are averaged.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(256, 10)
data = TensorDataset(x, x.abs().sum(1, keepdim=True))
net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).requires_grad_(False)
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
epoch = 0
for layer in (4, 2, 0):
    net[layer].requires_grad_(True)
    model = DDP(net)
    opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        sampler.set_epoch(epoch)
        epoch += 1
        for a, b in loader:
            loss = F.mse_loss(model(a), b)
            opt.zero_grad()
            loss.backward()
            opt.step()
dist.destroy_process_group()
