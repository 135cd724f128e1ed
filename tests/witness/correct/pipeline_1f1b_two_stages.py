# A pipeline of two stages with the 1F1B schedule. Both ranks read the same loader in the same order: the first uses the
# inputs, the last the targets. The stages have different parameters, optimizers and learning rates.
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset

MICRO = 4
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 10)
loader = DataLoader(
    TensorDataset(x, x.cumsum(1)[:, -3:]), 16, shuffle=True, generator=torch.Generator().manual_seed(1), drop_last=True
)
if rank == 0:
    part, opt_class, lr = nn.Sequential(nn.Linear(10, 32), nn.Tanh()), torch.optim.SGD, 0.05
else:
    part, opt_class, lr = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)), torch.optim.Adam, 3e-3
opt = opt_class(part.parameters(), lr=lr)
stage = PipelineStage(part, rank, world, torch.device("cpu"))
schedule = Schedule1F1B(stage, MICRO, loss_fn=nn.functional.mse_loss)
for epoch in range(3):
    for a, b in loader:
        opt.zero_grad()
        if rank == 0:
            schedule.step(a)
        else:
            losses = []
            schedule.step(target=b, losses=losses)
        opt.step()
if rank == 1:
    print(torch.stack(losses).mean().item())
dist.barrier()
dist.destroy_process_group()
