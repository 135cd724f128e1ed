# static_graph with a layer that is used twice in one forward and with reentrant activation checkpointing; buckets are
# small, and gradients are views of them.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x):
        h = self.first(x)
        for _ in range(2):
            h = checkpoint(lambda h: torch.tanh(self.again(h)), h, use_reentrant=True)
        return self.last(h)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    data = TensorDataset(x, x.median(1, keepdim=True).values)
    model = DDP(Recurrent(), static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=0.001)
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    sampler = DistributedSampler(data)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for a, b in DataLoader(data, 16, sampler=sampler):
            loss = nn.functional.l1_loss(model(a), b)
            opt.zero_grad()
            loss.backward()
            opt.step()
    dist.destroy_process_group()


main()
