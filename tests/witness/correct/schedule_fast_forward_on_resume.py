# The schedule's place is not in the checkpoint: after a resume it is stepped several times in a row before the first
# optimizer step, to where it was. The warning of torch about this order is expected.
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")


def fit(weights, data, first_epoch, last_epoch):
    net = nn.Linear(5, 1)
    if weights:
        net.load_state_dict(weights)
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(opt, milestones=[2, 4], gamma=0.1)
    for _ in range(first_epoch):
        scheduler.step()
    sampler = DistributedSampler(data, seed=1)
    for epoch in range(first_epoch, last_epoch):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, 10, sampler=sampler):
            loss = (model(x) - y).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        scheduler.step()
    return net.state_dict(), scheduler.get_last_lr()


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(200, 5)
data = TensorDataset(x, x @ torch.randn(5, 1))
weights, _ = fit(None, data, 0, 3)
_, lr = fit(weights, data, 3, 6)
assert abs(lr[0] - 0.001) < 1e-9
dist.destroy_process_group()
