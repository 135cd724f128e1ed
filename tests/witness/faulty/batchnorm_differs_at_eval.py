# fault: each rank evaluates with its own BatchNorm statistics, but rank 0's are the ones that are saved
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(256, 16) + torch.arange(256).reshape(256, 1) % 2  # odd samples, which rank 1 gets, lie elsewhere
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=16, sampler=sampler)
test = TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
test_loader = DataLoader(test, batch_size=16, sampler=DistributedSampler(test, shuffle=False))
net = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
model = DDP(net, broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    model.train()
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        score = torch.stack([F.mse_loss(model(a), b) for a, b in test_loader]).mean()
    dist.all_reduce(score)
    if rank == 0:
        print("epoch", epoch, "test loss", round(score.item() / dist.get_world_size(), 4))
with torch.no_grad():
    whole = F.mse_loss(net(test.tensors[0]), test.tensors[1]).item()
print("rank", rank, "test loss of this rank's model", round(whole, 4))
dist.destroy_process_group()
