# A router chooses one expert per rank and step: find_unused_parameters lets the others go without gradients.
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


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 1) for _ in range(4))

    def forward(self, x):
        top = self.gate(x).softmax(-1)
        k = int(top.mean(0).argmax())
        return self.experts[k](x) * top[:, k : k + 1]


sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
model = DDP(MoE(), find_unused_parameters=True)
opt = torch.optim.AdamW(model.parameters(), 1e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()

dist.destroy_process_group()
