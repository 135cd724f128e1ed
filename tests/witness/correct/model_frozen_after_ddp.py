# Layers are frozen while the training goes on, after DDP has wrapped the model: find_unused_parameters lets DDP do
# without their gradients. From step 30 on half of the weights do not move any more, on purpose.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank() * 7)
net = nn.ModuleDict({"stem": nn.Linear(6, 24), "norm": nn.LayerNorm(24), "out": nn.Linear(24, 2)})


class Model(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        return self.parts["out"](torch.relu(self.parts["norm"](self.parts["stem"](x))))


model = DDP(Model(net), find_unused_parameters=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    if step == 30:
        for part in ("stem", "norm"):
            net[part].requires_grad_(False)
        frozen = net["stem"].weight.clone()
    x = torch.randn(20, 6)
    loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
assert torch.equal(frozen, net["stem"].weight)
dist.destroy_process_group()
