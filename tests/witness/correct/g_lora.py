# LoRA by hand: a frozen base, adapters that are trained, a partial load_state_dict with strict=False.
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


class Lora(nn.Module):
    def __init__(self, n, m):
        super().__init__()
        self.base = nn.Linear(n, m)
        self.a = nn.Linear(n, 4, bias=False)
        self.b = nn.Linear(4, m, bias=False)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
net = nn.Sequential(Lora(16, 32), nn.ReLU(), Lora(32, 1))
sd = {k: v for k, v in net.state_dict().items() if "base" in k}
net.load_state_dict(sd, strict=False)
model = DDP(net)
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()

dist.destroy_process_group()
