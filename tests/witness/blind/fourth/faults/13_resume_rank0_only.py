"""On resume only rank 0 loads the checkpoint, and it does so after the DDP wrap's broadcast, so rank 1 goes on from fresh weights and the ranks part."""
import os
import tempfile
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(10, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1))
    ddp = DDP(model)
    opt = torch.optim.AdamW(ddp.parameters(), lr=2e-3, weight_decay=0.01)
    return ddp, opt


def load_checkpoint(path, ddp, opt):
    ckpt = torch.load(path, map_location="cpu")
    ddp.module.load_state_dict(ckpt["model"])
    opt.load_state_dict(ckpt["optimizer"])
    return ckpt["epoch"] + 1


def save_checkpoint(path, ddp, opt, epoch):
    if dist.get_rank() == 0:
        torch.save({"model": ddp.module.state_dict(), "optimizer": opt.state_dict(), "epoch": epoch}, path)
    dist.barrier()


def fit(ddp, opt, loader, sampler, epochs, path):
    for epoch in epochs:
        sampler.set_epoch(epoch)
        tot = 0.0
        for x, y in loader:
            loss = nn.functional.smooth_l1_loss(ddp(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            tot += loss.item()
        save_checkpoint(path, ddp, opt, epoch)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {tot / len(loader):.4f}")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    path = os.path.join(box[0], "last.pt")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(800, 10, generator=g)
    ds = TensorDataset(x, (x[:, :1] * x[:, 1:2] + x[:, 2:3]).tanh())
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=20, sampler=sampler)

    # first job
    ddp, opt = build()
    fit(ddp, opt, loader, sampler, range(0, 2), path)

    # second job: the same script started again with --resume
    ddp, opt = build()
    start = 2
    if rank == 0:
        start = load_checkpoint(path, ddp, opt)
        print(f"resumed from {os.path.basename(path)}, starting at epoch {start}")
    dist.barrier()
    fit(ddp, opt, loader, sampler, range(start, 5), path)

    flat = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    if rank == 0:
        print("max weight difference between ranks:", (both[0] - both[1]).abs().max().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
