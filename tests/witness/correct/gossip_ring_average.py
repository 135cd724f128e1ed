# ranks: 4
# Decentralized SGD: after each step a rank averages its weights with those of its neighbours in the ring, by
# point-to-point messages. The weights are never equal on all ranks, they only stay close.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(rank)
torch.manual_seed(0)
model = nn.Linear(8, 1)
true = torch.randn(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
left, right = (rank - 1) % world, (rank + 1) % world
for step in range(50):
    x = torch.randn(16, 8, generator=g)
    loss = F.mse_loss(model(x), x @ true)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    from_left, from_right = torch.empty_like(vector), torch.empty_like(vector)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, vector, left, tag=1),
            dist.P2POp(dist.isend, vector, right, tag=2),
            dist.P2POp(dist.irecv, from_right, right, tag=1),
            dist.P2POp(dist.irecv, from_left, left, tag=2),
        ]
    )
    for request in requests:
        request.wait()
    nn.utils.vector_to_parameters((vector + from_left + from_right) / 3, model.parameters())
assert F.mse_loss(model.weight, true.T) < 0.1
dist.barrier()
dist.destroy_process_group()
