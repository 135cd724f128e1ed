"""The resume restores the model and the optimizer but neither the epoch nor the scheduler, so warm-up and data order begin anew."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build_data():
    g = torch.Generator().manual_seed(2)
    x = torch.randn(600, 16, generator=g)
    y = torch.stack([x[:, :8].prod(1).tanh(), x[:, 8:].sum(1)], 1)
    return TensorDataset(x, y, torch.arange(600))


def warmup_then_decay(total, warmup=20):
    return lambda s: (s + 1) / warmup if s < warmup else max(0.0, (total - s) / (total - warmup))


def run(ckpt_path, stop_after, total_epochs=6, resume=False):
    """Trains up to epoch `stop_after`; one call is one job."""
    torch.manual_seed(0)
    data = build_data()
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, 2)))
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    sched = LambdaLR(opt, warmup_then_decay(total_epochs * len(loader)))
    start_epoch = 0
    if resume:
        ckpt = torch.load(ckpt_path)
        model.module.load_state_dict(ckpt["model"])
        opt.load_state_dict(ckpt["optimizer"])
    lrs, firsts = [], []
    for epoch in range(start_epoch, stop_after):
        sampler.set_epoch(epoch)
        for step, (x, y, idx) in enumerate(loader):
            loss = nn.functional.smooth_l1_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            lrs.append(opt.param_groups[0]["lr"])
            sched.step()
            if step == 0:
                firsts.append(idx[:3].tolist())
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} lr {lrs[-1]:.2e}")
            torch.save({"model": model.module.state_dict(), "optimizer": opt.state_dict(),
                        "scheduler": sched.state_dict(), "epoch": epoch}, ckpt_path)
        dist.barrier()
    return lrs, firsts


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "last.pt")
    lrs, firsts = run(path, stop_after=3)
    lrs2, firsts2 = run(path, stop_after=6, resume=True)
    if dist.get_rank() == 0:
        print(f"lr before the stop {lrs[-1]:.2e}, after the resume {lrs2[0]:.2e}, then {lrs2[1]:.2e}; "
              f"epoch orders repeated: {sum(f in firsts for f in firsts2)}; epochs trained: {len(firsts) + len(firsts2)} of 6 meant")
    dist.destroy_process_group()
