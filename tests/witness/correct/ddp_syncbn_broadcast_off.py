# Two kinds of normalization: SyncBatchNorm is for GPUs, so BatchNorm's statistics are averaged by hand at the end of
# an epoch; DDP's broadcast of buffers is off, and between the ranks' buffers differ on purpose.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(240, 3, 8, 8), torch.randint(0, 4, (240,)))
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
model = DDP(net, broadcast_buffers=False)
opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
sampler = DistributedSampler(data)
for epoch in range(4):
    sampler.set_epoch(epoch)
    model.train()
    for x, y in DataLoader(data, 12, sampler=sampler):
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    for name, buffer in net.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            dist.all_reduce(buffer)
            buffer /= world
    model.eval()
dist.destroy_process_group()
