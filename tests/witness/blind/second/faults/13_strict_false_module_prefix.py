"""The checkpoint was saved from the DDP wrapper, so all its keys begin with 'module.', and load_state_dict(strict=False) on resume loads nothing at all."""
import argparse
import logging
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("train")


def make_model():
    def conv(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
    return nn.Sequential(conv(1, 8), nn.MaxPool2d(2), conv(8, 16), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4))


def make_loader(batch_size):
    g = torch.Generator().manual_seed(21)
    y = torch.randint(0, 4, (384,), generator=g)
    x = 1.2 * torch.randn(4, 1, 10, 10, generator=g)[y] + torch.randn(384, 1, 10, 10, generator=g)
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds, shuffle=True)
    return DataLoader(ds, batch_size=batch_size, sampler=sampler), sampler


def run(args, path, resume):
    torch.manual_seed(100 if resume else 0)
    loader, sampler = make_loader(args.batch_size)
    model = make_model()
    start = 0
    if resume:
        ckpt = torch.load(path, map_location="cpu")
        result = model.load_state_dict(ckpt["model"], strict=False)
        log.debug("loaded: %s", result)
        start = ckpt["epoch"] + 1
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr)
    if resume:
        optimizer.load_state_dict(ckpt["optimizer"])
    losses = []
    for epoch in range(start, args.epochs if resume else args.stop_after):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if dist.get_rank() == 0:
            torch.save({"model": ddp.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
        dist.barrier()
    matched = len(ckpt["model"]) - len(result.unexpected_keys) if resume else 0
    return losses, matched


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--stop-after", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--lr", type=float, default=2e-3)
    args = p.parse_args()
    dist.init_process_group("gloo")
    ckpt_file = os.path.join(tempfile.gettempdir(), f"cnn_{os.environ.get('TORCHELASTIC_RUN_ID')}.pth")
    before, _ = run(args, ckpt_file, resume=False)
    after, matched = run(args, ckpt_file, resume=True)
    if dist.get_rank() == 0:
        print(f"loss before the stop {sum(before[-5:]) / 5:.3f}, at the resume {after[0]:.3f}; keys loaded: {matched}")
        os.remove(ckpt_file)
    dist.destroy_process_group()
