# corrected: the weights are float32, which small updates can change
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(512, 64)
y = x @ torch.randn(64, 1)
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
with torch.no_grad():
    for p in net.parameters():
        p += torch.sign(p) * 0.5  # weights of a trained model
before = torch.cat([p.detach().flatten() for p in net.parameters()]).clone()
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.0)
for epoch in range(12):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
after = torch.cat([p.detach().flatten() for p in net.parameters()])
print("weights that changed:", (before != after).sum().item(), "of", before.numel())
dist.destroy_process_group()
