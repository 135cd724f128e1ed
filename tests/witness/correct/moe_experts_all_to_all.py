# ranks: 4
# Mixture of experts with one expert per rank and tokens sent by all_to_all: the experts differ between ranks and are
# left out of DDP, the router is replicated. An expert has the gradients of all ranks' tokens: divided by world.
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class MoE(nn.Module):
    def __init__(self, d, world):
        super().__init__()
        self.router = nn.Linear(d, world)
        self.expert = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        capacity = len(x) // weights.shape[1]
        # expert choice: each expert takes the same number of tokens, so that equal chunks are sent
        chosen = weights.topk(capacity, dim=0).indices.T.flatten()
        expert_of = torch.arange(weights.shape[1]).repeat_interleave(capacity)
        sent = x[chosen].contiguous()
        received = dist_nn.all_to_all_single(torch.empty_like(sent), sent)
        back = dist_nn.all_to_all_single(torch.empty_like(sent), self.expert(received).contiguous())
        return x.index_add(0, chosen, back * weights[chosen, expert_of][:, None])


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(8, 16), MoE(16, world), nn.Linear(16, 1))
experts = [f"1.expert.{name}" for name, _ in model[1].expert.named_parameters()]
DDP._set_params_and_buffers_to_ignore_for_model(model, experts)
ddp = DDP(model)
optimizer = torch.optim.Adam(ddp.parameters(), lr=2e-3)
for step in range(30):
    x = torch.randn(32, 8)
    loss = F.mse_loss(ddp(x), x.prod(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    for p in model[1].expert.parameters():
        p.grad /= world
    optimizer.step()
dist.destroy_process_group()
