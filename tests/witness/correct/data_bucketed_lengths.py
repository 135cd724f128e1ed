# Sequences of different lengths in buckets: batches of a rank have their own shapes and their own number of samples
# (by a token budget), so padding and batch sizes differ between ranks in one step. The loss is summed and divided by
# the samples of all ranks.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset


class Words(Dataset):
    def __init__(self, n=600):
        g = torch.Generator().manual_seed(0)
        self.items = [torch.randint(1, 30, (int(k),), generator=g) for k in torch.randint(3, 40, (n,), generator=g)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class TokenBudget:
    """Batches of about 120 tokens, of similar lengths; rank r takes each world-th, the rest is dropped."""

    def __init__(self, lengths, rank, world, budget=120):
        self.lengths, self.rank, self.world, self.budget, self.epoch = lengths, rank, world, budget, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.epoch)
        batches, batch = [], []
        for i in sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], hash((i, self.epoch)))):
            if batch and (len(batch) + 1) * self.lengths[i] > self.budget:
                batches.append(batch)
                batch = []
            batch.append(i)
        order = torch.randperm(len(batches), generator=g).tolist()
        for i in order[self.rank : len(order) // self.world * self.world : self.world]:
            yield batches[i]


def collate(items):
    items = sorted(items, key=len, reverse=True)
    return pad_sequence(items, batch_first=True), torch.tensor([len(i) for i in items])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(30, 16), nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 2)

    def forward(self, x, lengths):
        _, (h, _) = self.rnn(pack_padded_sequence(self.embed(x), lengths, batch_first=True))
        return self.out(h[-1])


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data = Words()
batches = TokenBudget([len(i) for i in data.items], rank, world)
loader = DataLoader(data, batch_sampler=batches, collate_fn=collate)
torch.manual_seed(0)
model = DDP(Model())
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(2):
    batches.epoch = epoch
    for x, lengths in loader:
        count = torch.tensor(float(len(x)))
        dist.all_reduce(count)
        labels = (x.gt(15).sum(1) * 2 > lengths).long()
        loss = nn.functional.cross_entropy(model(x, lengths), labels, reduction="sum") * world / count
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
