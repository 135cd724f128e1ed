"""Gradient accumulation over 4 micro-batches clears the gradients before every micro-batch, so each update uses the last one only and 3 of 4 are wasted."""
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUM = 4


class Seq2Label(nn.Module):
    def __init__(self, vocab=50, dim=32, classes=5):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, 48, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(96, classes)

    def forward(self, tokens):
        out, _ = self.lstm(self.embedding(tokens))
        return self.fc(self.dropout(out.max(1).values))


def data(n=960):
    g = torch.Generator().manual_seed(13)
    x = torch.randint(1, 50, (n, 12), generator=g)
    return TensorDataset(x, (x[:, :3].float().mean(1) // 10).long().clamp(0, 4))


def train_epoch(model, loader, optimizer, counters):
    model.train()
    for step, (tokens, labels) in enumerate(loader):
        last = (step + 1) % ACCUM == 0
        optimizer.zero_grad(set_to_none=True)
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(tokens), labels)
            (loss / ACCUM).backward()
        counters["micro"] += 1
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            counters["used"] += 1
    return loss.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(7 + dist.get_rank())
    ds = data()
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=10, sampler=sampler)
    model = DDP(Seq2Label())
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    counters = {"micro": 0, "used": 0}
    for epoch in range(4):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer, counters)
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss:.3f}")
    if dist.get_rank() == 0:
        print(f"micro-batches run: {counters['micro']}, whose gradient reached an update: {counters['used']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
