# All ranks read the same sequences, under FSDP2 over all of them: the model takes this rank's positions and gathers its
# outputs again, so that inputs and losses are equal and the gradients that FSDP averages are each of a part.
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


class Split(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, d), nn.Sequential(nn.Linear(d, d), nn.Tanh()), nn.Linear(d, 20)

    def forward(self, tokens):
        own = tokens.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        out = self.head(self.mix(self.embed(own)))
        return torch.cat(dist_nn.all_gather(out.contiguous()), 1)  # its backward sums, and FSDP divides


dist.init_process_group("gloo")
torch.manual_seed(0)
tokens = torch.randint(0, 20, (160, 33), generator=torch.Generator().manual_seed(0))
model = Split()
for part in (model.mix, model):
    fully_shard(part)
opt = torch.optim.AdamW(model.parameters(), 3e-3)
loader = DataLoader(TensorDataset(tokens), 8, shuffle=True, generator=torch.Generator().manual_seed(1))
for epoch in range(4):
    for (batch,) in loader:
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
