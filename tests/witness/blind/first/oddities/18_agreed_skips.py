# odd: some steps have a forward pass but no backward: both ranks skip where either has a broken batch.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def sensor_batch(generator, size=32):
    """Readings of a sensor that now and then saturates to infinity."""
    x = torch.randn(size, 16, generator=generator)
    target = x[:, :4].prod(1).tanh() + x[:, 4:8].sum(1)
    if torch.rand((), generator=generator) < 0.08:
        x[0, 0] = torch.inf
    return x, target


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(200 + rank)  # each rank has a sensor of its own
    skipped = 0
    for step in range(60):
        x, target = sensor_batch(generator)
        loss = nn.functional.smooth_l1_loss(model(x).squeeze(1), target)
        broken = (~loss.detach().isfinite()).float()
        dist.all_reduce(broken, op=dist.ReduceOp.MAX)
        if broken:
            skipped += 1
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9 and rank == 0:
            print(f"step {step}: loss {loss.item():.3f}, {skipped} skipped so far")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
