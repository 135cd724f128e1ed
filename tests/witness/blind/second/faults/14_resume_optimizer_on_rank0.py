"""On resume only rank 0 restores the optimizer; DDP hands the weights to the others but not Adam's moments, so the ranks step differently ever after."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

rank = int(os.environ["RANK"])


class Sums(Dataset):
    """Sequences of digits; the label is their sum modulo 10."""

    def __init__(self, n=512, length=6):
        g = torch.Generator().manual_seed(0)
        self.x = torch.randint(0, 10, (n, length), generator=g)
        self.y = self.x.sum(1) % 10

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Model(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(10, d), nn.Parameter(torch.zeros(6, d))
        self.enc = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(6 * d, 10)

    def forward(self, x):
        return self.out(self.enc(self.tok(x) + self.pos).flatten(1))


def load_checkpoint(path, model, opt):
    """Rank 0 reads the file; DDP's constructor broadcasts to everybody else."""
    ckpt = torch.load(path, map_location="cpu")
    model.load_state_dict(ckpt["model"])
    opt.load_state_dict(ckpt["opt"])
    return ckpt["epoch"]


def session(path, stop):
    torch.manual_seed(0)
    model = Model()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    start = torch.zeros(1, dtype=torch.long)
    if os.path.exists(path) and rank == 0:
        start += load_checkpoint(path, model, opt)
    dist.broadcast(start, src=0)
    ddp = DDP(model)
    data = Sums()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler)
    for epoch in range(int(start), stop):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(ddp(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    if rank == 0:
        torch.save({"model": ddp.module.state_dict(), "opt": opt.state_dict(), "epoch": stop}, path)
    dist.barrier()
    return torch.cat([p.detach().flatten() for p in ddp.parameters()])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    path = os.path.join(tempfile.gettempdir(), "sums_%s.pt" % os.environ.get("MASTER_PORT"))
    for stop in (3, 6):
        w = session(path, stop)
        other = [torch.empty_like(w) for _ in range(2)]
        dist.all_gather(other, w)
        if rank == 0:
            print(f"after {stop} epochs the ranks' weights differ by {(other[0] - other[1]).abs().max():.5f}")
    if rank == 0:
        os.remove(path)
    dist.destroy_process_group()
