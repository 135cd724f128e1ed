# A regularizer that projects all ranks' embeddings on random directions (as SIGReg does). The directions must be the
# same on all ranks, because the projected moments are all-reduced: they are drawn with the step as the seed and
# passed to the model's forward. Only the samples differ between ranks.
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 12))

    def forward(self, x, directions):
        z = self.net(x)
        return z, z @ directions.T


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mine = torch.Generator().manual_seed(900 + rank)
model = DDP(Encoder())
opt = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(50):
    x = torch.randn(32, 12, generator=mine)
    shared = torch.Generator().manual_seed(step)
    directions = nn.functional.normalize(torch.randn(16, 12, generator=shared), dim=1)
    z, projected = model(x, directions)
    moments = torch.stack([projected.mean(0), projected.square().mean(0)])
    moments = dist_nn.all_reduce(moments) / world
    gaussian = moments[0].square().mean() + (moments[1] - 1).square().mean()
    loss = (z - x).square().mean() + 0.1 * gaussian
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
