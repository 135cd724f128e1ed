# A large embedding with sparse gradients and SparseAdam: in one step only a few rows move, most never do. The sparse
# gradients are exchanged as indices and values, without DDP. A dense optimizer takes the rest.
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
table, head = nn.Embedding(20_000, 8, sparse=True), nn.Linear(8, 2)
sparse, dense = torch.optim.SparseAdam(table.parameters(), lr=1e-2), torch.optim.Adam(head.parameters(), lr=1e-2)
users = torch.Generator().manual_seed(rank)


def average_sparse(p):
    grad = p.grad.coalesce()
    everyone = [None] * world
    dist.all_gather_object(everyone, (grad.indices(), grad.values()))
    indices = torch.cat([i for i, _ in everyone], 1)
    values = torch.cat([v for _, v in everyone]) / world
    p.grad = torch.sparse_coo_tensor(indices, values, p.shape).coalesce()


for step in range(40):
    ids = torch.randint(0, 300, (32,), generator=users) ** 2 % 20_000
    loss = nn.functional.cross_entropy(head(table(ids)), ids % 2)
    sparse.zero_grad()
    dense.zero_grad()
    loss.backward()
    average_sparse(table.weight)
    for p in head.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    sparse.step()
    dense.step()
dist.destroy_process_group()
