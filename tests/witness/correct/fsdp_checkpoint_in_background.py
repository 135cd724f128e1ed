# FSDP2 with checkpoints that torch writes in a thread, over a group of their own, while the training goes on: the
# threads of the ranks call that group's collectives at different steps.
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
saves = dist.new_group(backend="gloo")
torch.manual_seed(0)
x = torch.randn(512, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
fully_shard(model)
opt = torch.optim.AdamW(model.parameters(), 1e-3)
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
sampler, step, saving = DistributedSampler(data), 0, None
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 16, sampler=sampler):
        loss = nn.functional.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % 12 == 0:
            if saving:
                saving.result()
            state = {"model": get_model_state_dict(model)}
            saving = dcp.async_save(state, checkpoint_id=f"{folder[0]}/{step}", process_group=saves)
saving.result()
dist.destroy_process_group()
