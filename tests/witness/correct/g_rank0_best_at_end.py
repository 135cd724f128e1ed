# After the last step rank 0 alone loads the best weights and tests them: the ranks differ then, and may.
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
model = DDP(nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), 0.05)
best = copy.deepcopy(model.module.state_dict())
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
if rank == 0:  # the best weights are tested by rank 0 alone
    model.module.load_state_dict(best)
    with torch.no_grad():
        print(F.mse_loss(model.module(data.tensors[0]), data.tensors[1]).item())
dist.barrier()
dist.destroy_process_group()
