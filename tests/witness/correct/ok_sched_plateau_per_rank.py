# corrected: ReduceLROnPlateau is stepped with the validation loss of all ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(256, 16)
y = x.sum(1, keepdim=True)
train = TensorDataset(x, y)
vx = torch.randn(48, 16)
val = TensorDataset(vx, vx.sum(1, keepdim=True) + torch.randn(48, 1))
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=16, sampler=sampler)
val_loader = DataLoader(val, batch_size=16, sampler=DistributedSampler(val, shuffle=False))
model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
for epoch in range(9):
    sampler.set_epoch(epoch)
    model.train()
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val_loss = sum(F.mse_loss(model(a), b).item() for a, b in val_loader) / len(val_loader)
    v = torch.tensor(val_loss)
    dist.all_reduce(v)
    scheduler.step(v.item())
w = torch.cat([p.detach().flatten() for p in model.parameters()])
both = [torch.zeros_like(w) for _ in range(2)]
dist.all_gather(both, w)
print("rank", rank, "lr", optimizer.param_groups[0]["lr"], "replicas differ by", (both[0] - both[1]).abs().max().item())
dist.destroy_process_group()
