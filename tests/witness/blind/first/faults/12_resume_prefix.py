# fault: the checkpoint's names begin with "module." (it is DDP's state dict) and the resume loads them with strict=False into the bare model, so that nothing matches and the training goes on from random weights.
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def load_data():
    x, y = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))


def train(checkpoint: Path, last_epoch: int):
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    start_epoch = 0
    saved = None
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location="cpu")
        model.load_state_dict(saved["model"], strict=False)
        start_epoch = saved["epoch"] + 1
        if dist.get_rank() == 0:
            print(f"resuming from epoch {start_epoch}")
    model = DDP(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])

    dataset = load_data()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)
    for epoch in range(start_epoch, last_epoch):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}")
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, checkpoint
            )
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    path = Path(tempfile.gettempdir()) / f"digits-{os.environ['TORCHELASTIC_RUN_ID']}.pt"
    train(path, last_epoch=3)  # the first job, up to its time limit
    train(path, last_epoch=5)  # the second
    if dist.get_rank() == 0:
        path.unlink()
    dist.destroy_process_group()
