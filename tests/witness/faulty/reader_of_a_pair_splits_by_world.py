# fault: one rank of each pair reads and passes on its batch, but its sampler splits the data over all ranks (ranks: 4)
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
pair, first = pairs[rank // 2], rank // 2 * 2
torch.manual_seed(0)
x = torch.randn(256, 16)
data = TensorDataset(x)
half = slice(0, 8) if rank == first else slice(8, 16)  # of the features that this rank's part of the model sees
model = DDP(nn.Linear(8, 4), process_group=columns[rank % 2])
opt = torch.optim.SGD(model.parameters(), 0.05)
sampler = DistributedSampler(data) if rank == first else None
for epoch in range(3):
    if rank == first:
        sampler.set_epoch(epoch)
    loader = iter(DataLoader(data, 8, sampler=sampler)) if rank == first else None
    for _ in range(256 // 8 // 4):
        batch = next(loader)[0] if rank == first else torch.empty(8, 16)
        dist.broadcast(batch, first, group=pair)
        loss = (model(batch[:, half]) - batch[:, half][:, :4]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert loader is None or next(loader, None) is None
dist.destroy_process_group()
