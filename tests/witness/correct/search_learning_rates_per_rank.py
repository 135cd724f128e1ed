# ranks: 4
# A search inside one launch: the same start, data and order on all ranks (no DDP), but each has another lr, and the
# worse half copies the better half's weights now and then (population-based training).
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 6)
data = TensorDataset(x, x[:, :1].sin() + x[:, 1:2])
model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
opt = torch.optim.SGD(model.parameters(), lr=10.0 ** -(rank + 0.5))
loader = DataLoader(data, 16, shuffle=True, generator=torch.Generator().manual_seed(5))
for epoch in range(6):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
    scores = [torch.zeros(()) for _ in range(world)]
    with torch.no_grad():
        dist.all_gather(scores, torch.nan_to_num(F.mse_loss(model(x), data.tensors[1]), 1e9))
    order = sorted(range(world), key=lambda r: scores[r].item())
    if epoch % 2:
        for good, bad in zip(order[: world // 2], order[world // 2 :], strict=True):
            for p in model.parameters():
                if rank == good:
                    dist.send(p.data, bad)
                elif rank == bad:
                    dist.recv(p.data, good)
            if rank == bad:
                opt.param_groups[0]["lr"] = 10.0 ** -(good + 0.7)
dist.destroy_process_group()
