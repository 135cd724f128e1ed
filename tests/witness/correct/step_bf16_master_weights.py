# A bf16 model with float32 master weights: the optimizer knows only the masters, whose gradients are copied by hand. So
# no parameter of the model is in an optimizer, and in many steps most bf16 weights do not change.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(320, 10)
data = TensorDataset(x, (x[:, :5].sum(1) > 0).long())
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2)).bfloat16())
weights = list(model.parameters())
masters = [p.detach().float().requires_grad_() for p in weights]
opt = torch.optim.AdamW(masters, lr=1e-4)
sampler = DistributedSampler(data)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 16, sampler=sampler):
        nn.functional.cross_entropy(model(a.bfloat16()).float(), b).backward()
        for p, m in zip(weights, masters, strict=True):
            m.grad = p.grad.float()
            p.grad = None
        opt.step()
        with torch.no_grad():
            for p, m in zip(weights, masters, strict=True):
                p.copy_(m)
dist.destroy_process_group()
