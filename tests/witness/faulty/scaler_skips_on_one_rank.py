# fault: torch's GradScaler looks at a rank's own FSDP shard: one rank alone skips a step and halves its scale
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.rare = nn.Linear(1, 32, bias=False)  # the end of the flat parameter: rank 1's

    def forward(self, x, rare):
        return self.dense(x) + self.rare(rare).sum(1, keepdim=True)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = Wide()
nn.init.zeros_(net.rare.weight)
model = FSDP(net, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
own = torch.Generator().manual_seed(rank)
for step in range(30):
    a, b = torch.randn(16, 16, generator=own), torch.randn(16, 1, generator=own)
    rare = torch.full((16, 1), 1e38 if step == 9 else 0.0)
    loss = F.mse_loss(model(a, rare), b)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print("rank", rank, "scale of the loss", scaler.get_scale())
dist.destroy_process_group()
