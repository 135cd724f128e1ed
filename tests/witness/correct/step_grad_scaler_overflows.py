# fp16 autocast with a GradScaler whose scale grows every five steps until it overflows: some steps are skipped, by
# all ranks alike because the gradients are averaged before they are looked at, and the weights stand still then.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(320, 8)
data = TensorDataset(x, x[:, :1] * 3)
model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", growth_interval=5, growth_factor=4.0)
sampler = DistributedSampler(data)
smaller = 0
for epoch in range(6):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 16, sampler=sampler):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(a).float() - b).square().mean()
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        smaller += scaler.get_scale() < before
assert smaller > 1
dist.destroy_process_group()
