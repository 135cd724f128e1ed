# Stochastic depth where whole layers are skipped in a step, by a generator that is equal on all ranks: so all ranks
# leave out the same parameters, whose gradients are then None. Dropout inside the layers differs by rank.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Deep(nn.Module):
    def __init__(self, depth=6, d=16):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Dropout(0.1)) for _ in range(depth))
        self.head = nn.Linear(d, 1)
        self.coin = torch.Generator().manual_seed(0)

    def forward(self, x):
        keep = torch.rand(len(self.blocks), generator=self.coin) > 0.3
        for block, kept in zip(self.blocks, keep.tolist(), strict=True):
            if kept or not self.training:
                x = x + block(x)
        return self.head(x)


dist.init_process_group("gloo")
torch.manual_seed(1 + dist.get_rank())
model = DDP(Deep(), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(60):
    x = torch.randn(32, 16)
    loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
same = nn.utils.parameters_to_vector(model.parameters()).detach()
first = same.clone()
dist.broadcast(first, 0)
assert torch.equal(same, first)
dist.destroy_process_group()
