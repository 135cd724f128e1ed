# DiLoCo: ten inner AdamW steps alone, then one outer Nesterov step on the averaged difference. Between outer steps
# the ranks' weights part on purpose; the outer weights are equal everywhere. There is no DDP.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

INNER = 10
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(640, 16)
data = TensorDataset(x, x[:, :1] * x[:, 1:2])
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
outer = [p.detach().clone().requires_grad_() for p in model.parameters()]
inner_opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
outer_opt = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
sampler = DistributedSampler(data, shuffle=True, seed=3)
loader = DataLoader(data, 16, sampler=sampler)
step = 0
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        inner_opt.zero_grad()
        loss.backward()
        inner_opt.step()
        step += 1
        if step % INNER == 0:
            for o, p in zip(outer, model.parameters(), strict=True):
                o.grad = o.detach() - p.detach()
                dist.all_reduce(o.grad)
                o.grad /= world
            outer_opt.step()
            with torch.no_grad():
                for o, p in zip(outer, model.parameters(), strict=True):
                    p.copy_(o)
assert step % INNER == 0
checksum = torch.stack([o.detach().double().sum() for o in outer])
reference = checksum.clone()
dist.broadcast(reference, 0)
assert torch.equal(checksum, reference)
dist.destroy_process_group()
