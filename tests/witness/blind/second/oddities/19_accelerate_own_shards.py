"""Loader and scheduler are not passed to accelerator.prepare: the files are shared out by the script itself and the schedule counts updates, so preparing them would be the mistake."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch.utils.data import DataLoader, IterableDataset


class ShardedFiles(IterableDataset):
    """Ten 'files' of uneven length; files go to processes in turn, each epoch in a new order common to all."""

    def __init__(self, rank, world, per_rank):
        self.rank, self.world, self.per_rank, self.epoch = rank, world, per_rank, 0
        self.sizes = [96, 80, 112, 96, 64, 128, 96, 88, 104, 96]

    def set_epoch(self, epoch):
        self.epoch = epoch

    def read(self, f):
        g = torch.Generator().manual_seed(500 + f)
        for k in range(self.sizes[f]):
            x = torch.randn(20, generator=g)
            yield {"x": x, "y": (x[:5].sum() > x[5].abs()).long(), "key": f * 1000 + k}

    def __iter__(self):
        g = torch.Generator().manual_seed(self.epoch)
        files = torch.randperm(len(self.sizes), generator=g).tolist()[self.rank :: self.world]
        left = self.per_rank                   # the same number on every process; the tail of the last file is dropped
        for f in files:
            for item in self.read(f):
                if left == 0:
                    return
                left -= 1
                yield item


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(3, device_specific=True)
    dataset = ShardedFiles(accelerator.process_index, accelerator.num_processes, per_rank=384)
    loader = DataLoader(dataset, batch_size=16)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    epochs, updates = 4, 4 * 384 // 16 // 2
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / updates)))
    model, optimizer = accelerator.prepare(net, optimizer)
    for epoch in range(epochs):
        dataset.set_epoch(epoch)
        model.train()
        keys = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(batch["x"]), batch["y"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
            keys += batch["key"].tolist()
        keys = gather_object(keys)
        accelerator.print(
            f"epoch {epoch} loss {loss.item():.3f} lr {scheduler.get_last_lr()[0]:.1e}; {len(keys)} samples, {len(set(keys))} different"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
