# Uneven inputs: rank 1 has five more batches, and Join answers DDP's collectives for rank 0.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))

from torch.distributed.algorithms.join import Join

torch.manual_seed(rank)
model = DDP(nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
with Join([model]):
    for i in range(20 + 5 * rank):
        loss = model(torch.randn(8, 16)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
