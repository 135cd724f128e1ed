# The expert is a rank's own: another start on each, ignored by DDP on purpose.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)


class N(nn.Module):
    def __init__(s):
        super().__init__()
        s.gate = nn.Linear(16, 16)
        s.expert = nn.Linear(16, 1)

    def forward(s, x):
        return s.expert(torch.relu(s.gate(x)))


net = N()
torch.manual_seed(rank)
nn.init.normal_(net.expert.weight)
DDP._set_params_and_buffers_to_ignore_for_model(net, ["expert.weight", "expert.bias"])
model = DDP(net)
opt = torch.optim.SGD(model.parameters(), 0.05)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()

dist.destroy_process_group()
