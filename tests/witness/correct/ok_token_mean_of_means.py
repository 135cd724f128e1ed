# corrected: the loss is divided by the number of tokens of all ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
own = torch.Generator().manual_seed(rank)
for step in range(30):
    ids = torch.randint(64, (8, 17), generator=own)
    labels = ids[:, 1:].clone()
    for row, length in enumerate(torch.randint(1, 17, (8,), generator=own).tolist()):
        labels[row, length:] = -100
    if rank == 1:
        labels[4:] = -100
    logits = model(ids[:, :-1])
    tokens = (labels != -100).sum()
    dist.all_reduce(tokens)
    weight = dist.get_world_size() / tokens  # DDP divides by the number of ranks
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") * weight
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("rank", rank, "weight of a token in the last step", round(weight.item(), 5))
dist.destroy_process_group()
