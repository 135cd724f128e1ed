# fault: to_empty() makes two parameters of a tied embedding and head
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class LM(torch.nn.Module):
    def __init__(self, vocab=64, dim=32):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, dim)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(dim, dim) for _ in range(2))
        self.head = torch.nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = h + torch.relu(block(h))
        return self.head(h)


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
with torch.device("meta"):
    model = LM()
model.to_empty(device="cpu")
torch.manual_seed(0)
for p in model.parameters():
    torch.nn.init.normal_(p, std=0.02)
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
gen = torch.Generator().manual_seed(dist.get_rank())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    ids = torch.randint(64, (8, 16), generator=gen)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("tied:", model.head.weight is model.embed.weight)
dist.destroy_process_group()
