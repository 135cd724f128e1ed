# Tensor and sequence parallelism: both ranks read the same batches, because they are parts of one model. LayerNorm's
# weights are replicated DTensors, the matrices are sharded, the output is gathered.
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
data = TensorDataset(torch.randn(160, 8, 16))
block = parallelize_module(
    Block(),
    mesh,
    {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    },
)
parallelize_module(block, mesh, PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)))
opt = torch.optim.AdamW(block.parameters(), lr=3e-3, foreach=False)
loader = DataLoader(data, 16, shuffle=True, generator=torch.Generator().manual_seed(0))
for epoch in range(3):
    for (x,) in loader:
        loss = (block(x) - x.flip(1)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
norm = block.norm.weight.full_tensor().detach().clone()
first = norm.clone()
dist.broadcast(first, 0)
assert torch.equal(norm, first)
dist.destroy_process_group()
