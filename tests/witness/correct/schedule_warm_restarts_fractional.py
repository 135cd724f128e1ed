# Cosine with warm restarts, stepped after every batch with the fraction of the epoch, as its documentation shows: the
# lr jumps up at each restart on purpose.
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    x = torch.randn(320, 6)
    return TensorDataset(x, x.pow(2).sum(1, keepdim=True))


def run(data, epochs=7):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=1, T_mult=2)
    iters = len(loader)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.smooth_l1_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step(epoch + i / iters)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} lr {scheduler.get_last_lr()[0]:.4f}")


if __name__ == "__main__":
    run(setup())
    dist.destroy_process_group()
