"""The ranks have different numbers of batches and optimizer steps of their own, which DDP's join context balances on purpose; the weights end equal."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def shard(rank):
    """Each rank owns the files that landed on its node; they are not of equal size."""
    n = 400 if rank == 0 else 320
    g = torch.Generator().manual_seed(60 + rank)
    x = torch.rand(n, 10, generator=g)
    return TensorDataset(x, (x.sum(1, keepdim=True) * 2).sin())


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(shard(rank), batch_size=20, shuffle=True, generator=torch.Generator().manual_seed(rank))
    steps = 0
    for epoch in range(3):
        with model.join():
            for x, y in loader:
                opt.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                opt.step()
                steps += 1
        print(f"rank {rank} epoch {epoch}: {steps} steps, loss {loss.item():.4f}")
    print(f"rank {rank} weight norm {model.module[0].weight.norm().item():.7f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
