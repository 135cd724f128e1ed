# Post-local SGD: after ten steps DDP averages in groups of one, and the optimizer averages every four steps.
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

from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
model = DDP(nn.Linear(16, 1))
sub = [dist.new_group([i]) for i in range(world)][rank]
model.register_comm_hook(PostLocalSGDState(None, sub, start_localSGD_iter=10), post_localSGD_hook)
opt = PostLocalSGDOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), PeriodicModelAverager(period=4, warmup_steps=10)
)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()

dist.destroy_process_group()
