# A communication hook of one's own: gradients are sent as int8 with error feedback, so each rank keeps another error,
# but all ranks decode the same sum and the replicas stay equal.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

errors = {}


def int8_hook(group, bucket):
    flat = bucket.buffer()
    key = tuple(id(p) for p in bucket.parameters())  # DDP makes new buckets after the first step
    flat = flat + errors.get(key, 0)
    scale = flat.abs().max()
    dist.all_reduce(scale, dist.ReduceOp.MAX, group=group)
    step = scale.clamp_min(1e-12) / 60  # two ranks of at most 60 fit an int8
    quantized = (flat / step).round().to(torch.int8)
    errors[key] = flat - quantized * step
    work = dist.all_reduce(quantized, group=group, async_op=True)
    return work.get_future().then(lambda f: f.value()[0].float() * step / dist.get_world_size())


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 4)))
model.register_comm_hook(dist.group.WORLD, int8_hook)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    x = torch.randn(32, 10)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
mine = nn.utils.parameters_to_vector(model.parameters()).detach()
first = mine.clone()
dist.broadcast(first, 0)
assert torch.equal(mine, first)
dist.destroy_process_group()
