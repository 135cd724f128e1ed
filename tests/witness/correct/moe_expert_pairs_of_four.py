# ranks: 4
# Expert parallelism 2 x data parallelism 2: ranks 0, 2 share expert 0 and ranks 1, 3 share expert 1. The dense layer
# is reduced over all four ranks, each expert only over its pair, by hand after backward.
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
pair, row = mesh["data"].get_group(), mesh["expert"].get_group()
torch.manual_seed(0)
dense = nn.Linear(8, 8)
torch.manual_seed(10 + mesh["expert"].get_local_rank())
expert = nn.Linear(8, 1)


class Gathered(torch.autograd.Function):
    """The two experts' outputs of both ranks' tokens, and back."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x, group=row)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=row)
        return grad.chunk(2)[dist.get_rank(row)].clone()


optimizer = torch.optim.SGD([*dense.parameters(), *expert.parameters()], lr=0.05)
own = torch.Generator().manual_seed(rank)
for step in range(40):
    x = torch.randn(16, 8, generator=own)
    hidden = dense(x).relu()
    everyone = Gathered.apply(hidden)  # the tokens of both ranks of this row
    ids = torch.arange(len(everyone)) % 2 == mesh["expert"].get_local_rank()
    target = Gathered.apply(x.sum(1, keepdim=True)).detach()
    loss = (expert(everyone[ids]) - target[ids]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for p in dense.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    for p in expert.parameters():
        dist.all_reduce(p.grad, group=pair)
        p.grad /= world
    optimizer.step()
mine = nn.utils.parameters_to_vector(dense.parameters()).detach()
parts = [torch.empty_like(mine) for _ in range(world)]
dist.all_gather(parts, mine)
assert all(torch.equal(mine, p) for p in parts)
dist.destroy_process_group()
