# Two schedulers on one optimizer (a warm-up and decay by SequentialLR per step, a factor per epoch by MultiplicativeLR),
# and momentum that is changed by hand. The inner schedulers of SequentialLR move by themselves.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(240, 7)
data = TensorDataset(x, x.square().mean(1, keepdim=True))
model = DDP(nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 1)))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
warmup, decay = lrs.LinearLR(opt, 0.1, total_iters=8), lrs.PolynomialLR(opt, total_iters=60, power=0.9)
per_step = lrs.SequentialLR(opt, [warmup, decay], milestones=[8])
per_epoch = lrs.MultiplicativeLR(opt, lambda epoch: 0.95)
sampler = DistributedSampler(data)
for epoch in range(5):
    sampler.set_epoch(epoch)
    opt.param_groups[0]["momentum"] = min(0.9, 0.5 + 0.1 * epoch)
    for a, b in DataLoader(data, 10, sampler=sampler):
        loss = nn.functional.huber_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        per_step.step()
    per_epoch.step()
dist.destroy_process_group()
