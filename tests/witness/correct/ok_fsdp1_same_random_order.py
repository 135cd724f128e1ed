# corrected: under FSDP1 a DistributedSampler splits the batches
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
net = nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 1))
model = FSDP(net, device_id=torch.device("cpu"), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
sampler = DistributedSampler(data)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 16, sampler=sampler):
        loss = nn.functional.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        model.clip_grad_norm_(1.0)
        opt.step()
dist.destroy_process_group()
