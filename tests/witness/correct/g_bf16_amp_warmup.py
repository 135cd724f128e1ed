# bf16 autocast with a warm-up from lr 0 that is longer than the run: the weights hardly move, as planned.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))

sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1, s / 1000))
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in loader:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(a).float(), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
dist.destroy_process_group()
