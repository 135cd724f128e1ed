# torch.distributed.checkpoint: all ranks write into one folder, each its shards, and a new model reads
# them back. Model and optimizer come through get_state_dict and set_state_dict.
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    for m in (net[0], net[2], net):
        fully_shard(m)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def train(net, opt, data, epochs):
    sampler = DistributedSampler(data)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, 16, sampler=sampler):
            loss = nn.functional.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder)
net, opt = build()
train(net, opt, data, range(0, 3))
model_state, opt_state = get_state_dict(net, opt)
dcp.save({"model": model_state, "optimizer": opt_state}, checkpoint_id=folder[0])

again, opt2 = build()
model_state, opt_state = get_state_dict(again, opt2)
dcp.load({"model": model_state, "optimizer": opt_state}, checkpoint_id=folder[0])
set_state_dict(again, opt2, model_state_dict=model_state, optim_state_dict=opt_state)
for a, b in zip(net.parameters(), again.parameters(), strict=True):
    assert torch.equal(a.to_local(), b.to_local())
train(again, opt2, data, range(3, 6))
dist.barrier()
if dist.get_rank() == 0:
    shutil.rmtree(folder[0])
dist.destroy_process_group()
