# The checkpoint was saved from the DDP model, so its keys begin with "module.": a first load with strict=False finds
# nothing, the script sees that and loads again without the prefix. Rank 0's file, read by all after a barrier.
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def load(net, path):
    state = torch.load(path, map_location="cpu", weights_only=True)
    result = net.load_state_dict(state, strict=False)
    if len(result.missing_keys) == len(net.state_dict()):
        state = {key.removeprefix("module."): value for key, value in state.items()}
        net.load_state_dict(state)


def train(net, steps, seed):
    model = DDP(net)
    data = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        x = torch.randn(16, 8, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return model


dist.init_process_group("gloo")
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder)
path = os.path.join(folder[0], "model.pt")
torch.manual_seed(0)
model = train(build(), 25, seed=1)
if dist.get_rank() == 0:
    torch.save(model.state_dict(), path)
dist.barrier()
net = build()
load(net, path)
assert torch.equal(net[0].weight, model.module[0].weight)
train(net, 25, seed=2)
dist.barrier()
if dist.get_rank() == 0:
    os.remove(path)
    os.rmdir(folder[0])
dist.destroy_process_group()
