"""The checkpoint keeps model, optimizer and step but not the scheduler, so after the resume the LR warms up from zero again and the decay is never reached."""
import math
import os
import tempfile
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TOTAL, WARMUP, PEAK = 80, 10, 4e-3


class UNetish(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, 2, 1)
        self.mid = nn.Conv2d(8, 8, 3, 1, 1)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.out = nn.Conv2d(9, 1, 3, 1, 1)

    def forward(self, x):
        h = F.silu(self.down(x))
        h = F.silu(self.mid(h)) + h
        return self.out(torch.cat([F.silu(self.up(h)), x], 1))


def cosine(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (TOTAL - WARMUP)))


def job(loader, sampler, path, stop_at, rank, lrs):
    torch.manual_seed(0)
    model = DDP(UNetish())
    opt = torch.optim.AdamW(model.parameters(), lr=PEAK)
    step = 0
    if os.path.exists(path):
        ck = torch.load(path)
        model.module.load_state_dict(ck["model"])
        opt.load_state_dict(ck["opt"])
        step = ck["step"]
        # LambdaLR is built on the configured peak lr
        for group in opt.param_groups:
            group["lr"] = group["initial_lr"] = PEAK
    sched = torch.optim.lr_scheduler.LambdaLR(opt, cosine)
    dist.barrier()
    while step < stop_at:
        sampler.set_epoch(step // len(loader))
        for noisy, clean in loader:
            loss = F.mse_loss(model(noisy), clean)
            opt.zero_grad()
            loss.backward()
            opt.step()
            lrs.append(opt.param_groups[0]["lr"])
            sched.step()
            step += 1
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f} lr {lrs[-1]:.2e}")
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "step": step}, path)
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    path = os.path.join(box[0], "ck.pt")
    g = torch.Generator().manual_seed(1)
    clean = torch.nn.functional.interpolate(torch.randn(320, 1, 4, 4, generator=g), size=16, mode="bilinear")
    ds = TensorDataset(clean + 0.3 * torch.randn(clean.shape, generator=g), clean)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=16, sampler=sampler)
    lrs = []
    job(loader, sampler, path, 40, rank, lrs)      # pre-empted here
    job(loader, sampler, path, TOTAL, rank, lrs)   # restarted by the queue
    if rank == 0:
        print(f"lr before the resume {lrs[39]:.2e}, after it {lrs[40]:.2e}, at the end {lrs[-1]:.2e} (should be ~0)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
