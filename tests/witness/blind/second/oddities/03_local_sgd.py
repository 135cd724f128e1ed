"""There is no gradient averaging and the ranks' weights differ for 8 steps at a time: local SGD with periodic averaging of weights and momentum, by design."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PERIOD = 8


class LocalSGD:
    """Each rank walks by itself and all meet at the mean every `period` steps."""

    def __init__(self, model, optimizer, period):
        self.model, self.optimizer, self.period, self.count = model, optimizer, period, 0
        for p in model.parameters():
            dist.broadcast(p.data, src=0)

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        self.count += 1
        if self.count % self.period == 0:
            self.average()

    @torch.no_grad()
    def average(self):
        world = dist.get_world_size()
        for p in self.model.parameters():
            dist.all_reduce(p.data)
            p.data /= world
            buf = self.optimizer.state[p].get("momentum_buffer")
            if buf is not None:
                dist.all_reduce(buf)
                buf /= world


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(50)
    x = torch.randn(768, 30, generator=g)
    y = ((x[:, :10] * x[:, 10:20]).sum(1) > 0).long()
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=16, sampler=sampler)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(30, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    local = LocalSGD(model, opt, PERIOD)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            local.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}")
    local.average()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    other = flat.clone()
    dist.broadcast(other, src=0)
    print(f"rank {rank}: off rank 0 at the end by {(flat - other).abs().max():.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
