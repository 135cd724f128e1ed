# A parameter server: gradients are reduced to rank 0, which alone has an optimizer and a schedule; rank 1 receives the
# new weights. So rank 1 never steps anything and its number of optimizer steps is zero.
import torch
import torch.distributed as dist
from torch import nn


class Server:
    def __init__(self, model):
        self.optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.98)

    def update(self):
        self.optimizer.step()
        self.schedule.step()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 1))
server = Server(model) if rank == 0 else None
for step in range(50):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    x = torch.randn(16, 7)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    model.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.reduce(p.grad, dst=0)
        p.grad /= world
    if server is not None:
        server.update()
dist.destroy_process_group()
