"""The two towers are called as `model.module.encode_*`, past DDP's forward, so gradients are never averaged and every rank trains its own model."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class PairDataset(Dataset):
    """Image features and the token ids of their captions."""

    def __init__(self, n=640):
        g = torch.Generator().manual_seed(11)
        topic = torch.randint(0, 20, (n,), generator=g)
        centres = torch.randn(20, 48, generator=g)
        self.img = centres[topic] + 0.4 * torch.randn(n, 48, generator=g)
        self.txt = (topic[:, None] * 5 + torch.randint(0, 5, (n, 8), generator=g))

    def __len__(self):
        return len(self.img)

    def __getitem__(self, i):
        return self.img[i], self.txt[i]


class TinyCLIP(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, dim))
        self.token = nn.Embedding(100, 64)
        self.text = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, dim))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def encode_image(self, x):
        return F.normalize(self.visual(x), dim=-1)

    def encode_text(self, t):
        return F.normalize(self.text(self.token(t).mean(1)), dim=-1)

    def forward(self, x, t):
        return self.encode_image(x), self.encode_text(t), self.logit_scale.exp()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    data = PairDataset()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(TinyCLIP())
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for img, txt in loader:
            zi = model.module.encode_image(img)
            zt = model.module.encode_text(txt)
            logits = model.module.logit_scale.exp() * zi @ zt.t()
            target = torch.arange(len(img))
            loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
            optim.zero_grad()
            loss.backward()
            optim.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    other = flat.clone()
    dist.broadcast(other, src=0)
    if rank == 1:
        print(f"max weight difference rank 1 - rank 0: {(flat - other).abs().max():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
