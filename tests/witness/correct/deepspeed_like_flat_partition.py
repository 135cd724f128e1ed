# ZeRO stage 2 as DeepSpeed does it: bf16 weights are views of one flat buffer, gradients are reduce-scattered, and each
# rank's optimizer has one float32 partition, which is no parameter of the model. Then the buffer is gathered.
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(320, 12)
data = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2)).bfloat16()
params = list(net.parameters())
size = sum(p.numel() for p in params)
flat = torch.zeros((size + world - 1) // world * world, dtype=torch.bfloat16)
at = 0
for p in params:
    flat[at : at + p.numel()] = p.data.flatten()
    p.data = flat[at : at + p.numel()].view_as(p)
    at += p.numel()
master = flat.chunk(world)[rank].float().clone().requires_grad_()
opt = torch.optim.AdamW([master], lr=2e-3)
sampler = DistributedSampler(data)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 16, sampler=sampler):
        nn.functional.cross_entropy(net(a.bfloat16()).float(), b).backward()
        grads = torch.zeros(flat.numel())
        grads[:size] = torch.cat([p.grad.flatten().float() for p in params])
        net.zero_grad()
        master.grad = torch.empty_like(master)
        dist.reduce_scatter_tensor(master.grad, grads)
        master.grad /= world
        opt.step()
        dist.all_gather_into_tensor(flat, master.detach().bfloat16())
same = flat.float()
first = same.clone()
dist.broadcast(first, 0)
assert torch.equal(same, first)
dist.destroy_process_group()
