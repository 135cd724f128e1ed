# A training is interrupted in the middle of its second epoch and resumed with new objects in the same process: the
# batches that were learnt before are fetched and passed over without a backward. It ends as an uninterrupted one.
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(data, checkpoint, stop_after=None, epochs=3):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    start_epoch = start_batch = steps = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start_epoch, start_batch, steps = state["epoch"], state["batch"], state["steps"]
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    for epoch in range(start_epoch, epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            if epoch == start_epoch and i < start_batch:
                continue
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            steps += 1
            if steps == stop_after:
                if dist.get_rank() == 0:
                    parts = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler}
                    state = {name: part.state_dict() for name, part in parts.items()}
                    torch.save(state | {"epoch": epoch, "batch": i + 1, "steps": steps}, checkpoint)
                dist.barrier()
                return model
    return model


dist.init_process_group("gloo")
g = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(320, 10, generator=g), torch.randn(320, 1, generator=g))
with tempfile.TemporaryDirectory() as own:
    folder = [own]
    dist.broadcast_object_list(folder)
    whole = train(data, Path(folder[0], "none.pt"))
    train(data, Path(folder[0], "last.pt"), stop_after=27)
    resumed = train(data, Path(folder[0], "last.pt"))
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    dist.barrier()
dist.destroy_process_group()
