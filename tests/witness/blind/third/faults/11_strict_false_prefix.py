"""The checkpoint's keys begin with "module." and are loaded with strict=False into the bare model: nothing is loaded and training starts from scratch."""
import logging
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("train")


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(40, 32), nn.Tanh(), nn.Linear(32, 6))
        self.dec = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 40))

    def forward(self, x):
        return self.dec(self.enc(x))


class Trainer:
    def __init__(self, workdir, data):
        self.rank = dist.get_rank()
        self.path = os.path.join(workdir, "checkpoint.pt")
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=25, sampler=self.sampler)
        self.epoch = 0
        net = Autoencoder()
        ckpt = torch.load(self.path) if os.path.exists(self.path) else None
        if ckpt:
            net.load_state_dict(ckpt["state_dict"], strict=False)
            self.epoch = ckpt["epoch"]
        self.model = DDP(net)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        if ckpt:
            self.opt.load_state_dict(ckpt["optimizer"])
            log.info("resumed at epoch %d", self.epoch)

    def fit(self, until):
        losses = []
        while self.epoch < until:
            self.sampler.set_epoch(self.epoch)
            for (x,) in self.loader:
                loss = nn.functional.mse_loss(self.model(x), x)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                losses.append(loss.item())
            self.epoch += 1
            if self.rank == 0:
                log.info("epoch %d loss %.4f", self.epoch, losses[-1])
                torch.save({"state_dict": self.model.state_dict(), "optimizer": self.opt.state_dict(),
                            "epoch": self.epoch}, self.path)
        dist.barrier()
        return losses


def main():
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(700, 6, generator=g) @ torch.randn(6, 40, generator=g))
    first = Trainer(box[0], data).fit(until=4)
    second = Trainer(box[0], data).fit(until=6)
    if dist.get_rank() == 0:
        print(f"loss: start {first[0]:.2f}, before the stop {first[-1]:.2f}, first after the resume {second[0]:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
