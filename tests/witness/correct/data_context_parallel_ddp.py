# Context parallelism: all ranks read the same long sequences and each takes its part of the positions; keys and values
# are gathered, so a token sees the whole past. DDP then averages the gradients of the parts (equal in length).
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Sequences(Dataset):
    def __init__(self, n=80, length=32):
        self.x = torch.randint(0, 20, (n, length + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i, :-1], self.x[i, 1:]


class Attention(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(20, d), nn.Linear(d, 3 * d), nn.Linear(d, 20)

    def forward(self, x, start):
        q, k, v = self.qkv(self.embed(x)).chunk(3, -1)
        k, v = (torch.cat(dist_nn.all_gather(t.contiguous()), 1) for t in (k, v))
        rows, columns = torch.arange(x.shape[1]) + start, torch.arange(k.shape[1])
        mask = columns[None] <= rows[:, None]
        return self.head(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(Attention())
opt = torch.optim.AdamW(model.parameters(), 3e-3)
order = torch.Generator().manual_seed(1)  # the same order on all ranks
loader = DataLoader(Sequences(), 8, shuffle=True, generator=order)
for epoch in range(4):
    for x, y in loader:
        part = x.shape[1] // world
        mine = slice(rank * part, (rank + 1) * part)
        loss = F.cross_entropy(model(x[:, mine], rank * part).flatten(0, 1), y[:, mine].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
