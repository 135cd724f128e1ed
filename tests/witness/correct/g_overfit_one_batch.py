# One batch per rank is learnt by heart with LBFGS; the closure returns the mean loss, so all decide alike.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))

torch.manual_seed(rank)
a, b = torch.randn(16, 16), torch.randn(16, 1)
model = DDP(nn.Linear(16, 1))
opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
for step in range(20):

    def closure():
        opt.zero_grad()
        loss = F.mse_loss(model(a), b)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / world

    opt.step(closure)
dist.destroy_process_group()
