# Truncated backpropagation through time: each rank reads its own part of one long text in order and carries the hidden
# state over, so nothing is shuffled and every epoch has the same batches in the same order, on purpose.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, WINDOW = 4, 16
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
text = torch.randint(0, 26, (world * BATCH * (WINDOW * 12 + 1),), generator=torch.Generator().manual_seed(0))
mine = text.chunk(world)[rank].view(BATCH, -1)


class CharRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(26, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 26)

    def forward(self, x, h):
        y, h = self.rnn(self.embed(x), h)
        return self.out(y), h


torch.manual_seed(0)
model = DDP(CharRNN())
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
for epoch in range(4):
    h = torch.zeros(1, BATCH, 32)
    for i in range(0, mine.shape[1] - 1, WINDOW):
        x, y = mine[:, i : i + WINDOW], mine[:, i + 1 : i + WINDOW + 1]
        out, h = model(x, h.detach())
        loss = nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
dist.destroy_process_group()
