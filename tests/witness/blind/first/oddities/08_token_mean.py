# odd: the loss is multiplied by the number of ranks, as FSDP divides by it: it is the mean over all tokens.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, LENGTH = 50, 24


class LM(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.LSTM(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def padded_batch(generator, size=16):
    start = torch.randint(0, VOCAB, (size, 1), generator=generator)
    ids = (start + 3 * torch.arange(LENGTH + 1)) % VOCAB
    lengths = torch.randint(4, LENGTH + 1, (size, 1), generator=generator)
    labels = ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100)
    return ids[:, :-1], labels


dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
model = LM()
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(dist.get_rank() + 1)
for step in range(40):
    ids, labels = padded_batch(generator)
    tokens = (labels != -100).sum()
    dist.all_reduce(tokens)
    total = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    loss = total * world / tokens
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 and dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.3f} over {tokens.item()} tokens")
dist.destroy_process_group()
