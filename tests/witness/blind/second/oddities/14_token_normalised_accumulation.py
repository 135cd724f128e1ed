"""The loss is a bare sum times the world size, windows hold 3 or fewer micro-batches, and some updates are skipped: token-true accumulation with a skip agreed by all ranks."""
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ACCUM, VOCAB, PAD = 3, 40, 0


class Sentences(Dataset):
    def __init__(self, n=640):
        g = torch.Generator().manual_seed(19)
        self.ids = torch.zeros(n, 15, dtype=torch.long)
        for row in self.ids:
            k = int(torch.randint(4, 16, (1,), generator=g))
            s, d = torch.randint(1, VOCAB, (2,), generator=g).tolist()
            row[:k] = (s + (d % 3 + 1) * torch.arange(k)) % (VOCAB - 1) + 1

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i]


class LM(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d, padding_idx=PAD)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def windows(loader, k):
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == k:
            yield window
            window = []
    if window:
        yield window


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    data = Sentences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    model = DDP(LM())
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    done, skipped, usual = 0, 0, float("inf")
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for window in windows(loader, ACCUM):
            tokens = torch.tensor(float(sum((b[:, 1:] != PAD).sum() for b in window)))
            dist.all_reduce(tokens)
            opt.zero_grad()
            total = 0.0
            for i, ids in enumerate(window):
                with contextlib.nullcontext() if i == len(window) - 1 else model.no_sync():
                    logits = model(ids[:, :-1]).flatten(0, 1)
                    loss = F.cross_entropy(logits, ids[:, 1:].flatten(), ignore_index=PAD, reduction="sum")
                    (loss * world / tokens).backward()      # DDP divides by the world size again
                total += loss.detach()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            # an outlier: left out; the norm is the averaged gradient's, so all ranks agree
            if not torch.isfinite(norm) or norm > 1.08 * usual:
                skipped += 1
                continue
            usual = norm.item() if done == 0 else 0.8 * usual + 0.2 * norm.item()
            opt.step()
            done += 1
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss per token {total / tokens:.3f}; {done} updates, {skipped} skipped")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
