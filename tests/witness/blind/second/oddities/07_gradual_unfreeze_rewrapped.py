"""Layers are frozen at first and unfrozen one by one while DDP is built anew each time, so that its reducer knows them: gradual unfreezing done right."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([
            nn.Sequential(nn.Linear(36, 64), nn.GELU()),
            nn.Sequential(nn.Linear(64, 64), nn.GELU()),
            nn.Sequential(nn.Linear(64, 48), nn.GELU()),
        ])
        self.head = nn.Linear(48, 7)

    def forward(self, x):
        for s in self.stages:
            x = s(x)
        return self.head(x)


class Unfreezer:
    def __init__(self, net):
        self.net = net
        net.stages.requires_grad_(False)
        self.closed = list(net.stages)
        self.opt = torch.optim.AdamW(net.head.parameters(), lr=3e-3)

    def open_next(self):
        if self.closed:
            stage = self.closed.pop().requires_grad_(True)
            self.opt.add_param_group({"params": list(stage.parameters()), "lr": 1e-3})

    def wrap(self):
        return DDP(self.net)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(8)
    y = torch.randint(0, 7, (700,))
    ds = TensorDataset(torch.randn(7, 36)[y] + torch.randn(700, 36), y)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=35, sampler=sampler)
    unfreezer = Unfreezer(Tower())
    model = unfreezer.wrap()
    for epoch in range(5):
        if epoch in (1, 2, 3):
            unfreezer.open_next()
            del model
            model = unfreezer.wrap()
        sampler.set_epoch(epoch)
        for x, t in loader:
            loss = F.cross_entropy(model(x), t)
            unfreezer.opt.zero_grad()
            loss.backward()
            unfreezer.opt.step()
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, {trained} weights training")
    mine = nn.utils.parameters_to_vector(unfreezer.net.parameters()).detach()
    ref = mine.clone()
    dist.broadcast(ref, 0)
    print(f"rank {dist.get_rank()}: off rank 0 by {(mine - ref).abs().max():.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
