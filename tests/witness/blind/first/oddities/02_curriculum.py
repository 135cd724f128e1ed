# odd: nothing is shuffled and set_epoch() is never called: each epoch goes from short to long, on purpose.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler


def bit_sequences(n):
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 20, (n,), generator=g).sort().values  # the easy ones first
    return [torch.randint(0, 2, (int(length),), generator=g) for length in lengths]


def collate(sequences):
    lengths = torch.tensor([len(s) for s in sequences])
    return {"bits": pad_sequence(sequences, batch_first=True), "lengths": lengths,
            "ones": torch.stack([s.float().mean() for s in sequences])}  # fmt: skip


class MeanOfBits(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru, self.out = nn.Embedding(2, 8), nn.GRU(8, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, batch):
        states, _ = self.gru(self.embed(batch["bits"]))
        last = states[torch.arange(len(states)), batch["lengths"] - 1]
        return self.out(last).squeeze(1)


dist.init_process_group("gloo")
torch.manual_seed(0)
data = bit_sequences(960)
loader = DataLoader(data, 32, sampler=DistributedSampler(data, shuffle=False), collate_fn=collate)
model = DDP(MeanOfBits())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(4):
    for batch in loader:
        loss = nn.functional.mse_loss(model(batch), batch["ones"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss at length {batch['bits'].size(1)}: {loss.item():.4f}")
dist.destroy_process_group()
