# corrected: the twin of tp_norm_parts.py does it on all ranks alike
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module


class Block(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
plan = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Replicate()),
}
block = parallelize_module(Block(), mesh, plan)
opt = torch.optim.AdamW(block.parameters(), lr=3e-3, foreach=False)
noise = torch.Generator().manual_seed(0)
data = torch.Generator().manual_seed(0)
for step in range(40):
    x = torch.randn(4, 8, 16, generator=data)
    part = x.chunk(dist.get_world_size(), 1)[rank]
    loss = (block(part) - x.flip(1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step == 12:
        with torch.no_grad():
            block.norm.weight.to_local().add_(0.01 * torch.randn(16, generator=noise))
dist.destroy_process_group()
