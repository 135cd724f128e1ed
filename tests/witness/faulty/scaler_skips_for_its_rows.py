# fault: torch's GradScaler unscales shards of FSDP1: one rank alone sees the overflow in its shard and skips the step
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(9, 1)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        return self.head(torch.cat([self.body(x[:, :8]).tanh(), x[:, 8:]], dim=1))


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(240, 9)
x[:, 8] = 0.0
x[0, 8] = 3e37  # a broken value; the weight that it is multiplied by is in the last rank's shard
data = TensorDataset(x, x[:, :1])
sampler = DistributedSampler(data, shuffle=False)
policy = ModuleWrapPolicy({nn.Linear})
model = FSDP(Net(), device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=policy)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 10, sampler=sampler):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(a), b)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
print("rank", dist.get_rank(), "scale of the loss", scaler.get_scale())
dist.destroy_process_group()
