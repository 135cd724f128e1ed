# DTensors without any wrapper: the data is sharded by samples, a replicated and a row-sharded parameter are made by
# hand, and DTensor itself reduces the gradients. Every rank builds the whole batch from one seed and keeps its shard.
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
true = torch.randn(6, 1)
weight = torch.nn.Parameter(distribute_tensor(torch.zeros(6, 1), mesh, [Replicate()]))
table = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 1), mesh, [Shard(0)]))
opt = torch.optim.SGD([weight, table], lr=0.1, foreach=False)
batches = torch.Generator().manual_seed(7)
for step in range(50):
    x = torch.randn(32, 6, generator=batches)
    x, y = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(x @ true + 1, mesh, [Shard(0)])
    bias = table.redistribute(mesh, [Replicate()]).mean()
    loss = (x @ weight + bias - y).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
assert torch.allclose(weight.full_tensor(), true, atol=0.1)
dist.destroy_process_group()
