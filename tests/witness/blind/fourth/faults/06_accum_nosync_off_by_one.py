"""Gradient accumulation: the no_sync test uses i % accum while the step uses (i + 1) % accum, so the step follows an unsynchronised micro-batch and the ranks part."""
import contextlib
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TextCNN(nn.Module):
    def __init__(self, vocab=200, d=24, classes=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(d, 16, k) for k in (2, 3, 4))
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(48, classes)

    def forward(self, ids):
        x = self.emb(ids).transpose(1, 2)
        x = torch.cat([F.relu(c(x)).amax(2) for c in self.convs], 1)
        return self.fc(self.drop(x))


def dataset(n=1600, T=20):
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(1, 200, (n, T), generator=g)
    y = torch.randint(0, 4, (n,), generator=g)
    for c in range(4):
        ids[y == c, 3:6] = torch.tensor([10 + c, 20 + c, 30 + c])
    return TensorDataset(ids, y)


def train(model, loader, sampler, opt, epochs, accum, rank):
    step = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for i, (ids, y) in enumerate(loader):
            sync = i % accum == 0
            ctx = contextlib.nullcontext() if sync else model.no_sync()
            with ctx:
                loss = F.cross_entropy(model(ids), y) / accum
                loss.backward()
            if (i + 1) % accum == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
                step += 1
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {loss.item() * accum:.4f}")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    ds = dataset()
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=10, sampler=sampler)
    model = DDP(TextCNN())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train(model, loader, sampler, opt, epochs=3, accum=4, rank=rank)

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    if rank == 0:
        print("max weight difference between ranks:", (both[0] - both[1]).abs().max().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
