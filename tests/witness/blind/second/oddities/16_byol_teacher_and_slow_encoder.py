"""Half of the weights are in no optimizer and get no gradient (the BYOL teacher, moved by hand), and the encoder steps only every second batch, on the gradients of both: by design."""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Views(Dataset):
    def __init__(self, n=640, d=32):
        g = torch.Generator().manual_seed(60)
        self.c = torch.randint(0, 8, (n,), generator=g)
        self.x = 1.5 * torch.randn(8, d, generator=g)[self.c] + torch.randn(n, d, generator=g)

    def __len__(self):
        return len(self.x)

    def augment(self, x):
        return x * (torch.rand_like(x) > 0.2) + 0.2 * torch.randn_like(x)

    def __getitem__(self, i):
        return self.augment(self.x[i]), self.augment(self.x[i])


class Online(nn.Module):
    def __init__(self, d=32, z=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(d, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, z))
        self.predictor = nn.Sequential(nn.Linear(z, 32), nn.ReLU(), nn.Linear(32, z))

    def forward(self, a, b):
        return self.predictor(self.encoder(a)), self.predictor(self.encoder(b))


class BYOL:
    def __init__(self, tau=0.97):
        self.online = DDP(Online())
        self.teacher = copy.deepcopy(self.online.module.encoder).requires_grad_(False)
        self.tau = tau
        self.opt_pred = torch.optim.AdamW(self.online.module.predictor.parameters(), lr=4e-3)
        self.opt_enc = torch.optim.AdamW(self.online.module.encoder.parameters(), lr=1e-3)

    def loss(self, a, b):
        with torch.no_grad():
            ta, tb = self.teacher(a), self.teacher(b)
        pa, pb = self.online(a, b)
        return 2 - F.cosine_similarity(pa, tb).mean() - F.cosine_similarity(pb, ta).mean()

    @torch.no_grad()
    def move_teacher(self):
        for t, p in zip(self.teacher.parameters(), self.online.module.encoder.parameters()):
            t.mul_(self.tau).add_(p, alpha=1 - self.tau)

    def step(self, i, a, b):
        loss = self.loss(a, b)
        loss.backward()                       # DDP averages what is accumulated, so two batches add up properly
        self.opt_pred.step()
        self.opt_pred.zero_grad()
        if i % 2 == 1:
            for p in self.online.module.encoder.parameters():
                p.grad.div_(2)
            self.opt_enc.step()
            self.opt_enc.zero_grad()
            self.move_teacher()
        return loss.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    data = Views()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    byol = BYOL()
    for epoch in range(5):
        sampler.set_epoch(epoch)
        losses = [byol.step(i, a, b) for i, (a, b) in enumerate(loader)]
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {sum(losses) / len(losses):.3f}")
    dist.destroy_process_group()
