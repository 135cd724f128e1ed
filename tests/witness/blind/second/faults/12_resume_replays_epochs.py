"""After a resume the sampler's epoch counts from 0 again, so the second half of the training sees exactly the orders of the first half once more."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def dataset(n=400):
    g = torch.Generator().manual_seed(6)
    y = torch.randint(0, 5, (n,), generator=g)
    x = torch.randn(5, 1, 28, generator=g)[y] + 0.7 * torch.randn(n, 1, 28, generator=g)
    return TensorDataset(x, y, torch.arange(n))


class Conv1d(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(16, 32, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(),
        )
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(128, 5)

    def forward(self, x):
        return self.fc(self.drop(self.body(x)))


class Trainer:
    def __init__(self, ckpt):
        self.ckpt, self.epoch = ckpt, 0
        torch.manual_seed(9)
        model = Conv1d()
        self.data = dataset()
        self.sampler = DistributedSampler(self.data, shuffle=True, seed=3)
        self.loader = DataLoader(self.data, batch_size=20, sampler=self.sampler)
        state = torch.load(ckpt) if os.path.exists(ckpt) else None
        if state:
            model.load_state_dict(state["model"])
        self.model = DDP(model)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.03, momentum=0.9, nesterov=True)
        if state:
            self.opt.load_state_dict(state["opt"])
            self.epoch = state["epoch"]

    def save(self):
        if dist.get_rank() == 0:
            torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(), "epoch": self.epoch}, self.ckpt)
        dist.barrier()

    def fit(self, until):
        orders = []
        torch.manual_seed(1000 * dist.get_rank() + self.epoch)
        for i, _ in enumerate(range(self.epoch, until)):
            self.sampler.set_epoch(i)
            order = []
            for x, y, idx in self.loader:
                loss = F.cross_entropy(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                order += idx.tolist()
            self.epoch += 1
            orders.append(order)
            if dist.get_rank() == 0:
                print(f"epoch {self.epoch} loss {loss.item():.3f}")
        self.save()
        return orders


if __name__ == "__main__":
    dist.init_process_group("gloo")
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    path = os.path.join(box[0], "last.pt")
    first = Trainer(path).fit(until=3)
    second = Trainer(path).fit(until=6)      # the job was preempted here and started again
    repeated = sum(a == b for a, b in zip(first, second))
    print(f"rank {dist.get_rank()}: epochs after the resume with the very order of an epoch before it: {repeated} of {len(second)}", flush=True)
    dist.destroy_process_group()
