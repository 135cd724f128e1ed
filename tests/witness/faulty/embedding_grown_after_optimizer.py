# fault: the vocabulary grows after the optimizer was created, which keeps the old embedding
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(60, 32), nn.Linear(32, 64))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
grown = nn.Embedding(64, 32)
with torch.no_grad():
    grown.weight[:60] = net[0].weight
net[0] = grown
before = grown.weight.detach().clone()
model = DDP(net)
own = torch.Generator().manual_seed(rank)
for step in range(30):
    ids = torch.randint(64, (8, 17), generator=own)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("rank", rank, "the embedding moved by", (grown.weight - before).norm().item())
dist.destroy_process_group()
