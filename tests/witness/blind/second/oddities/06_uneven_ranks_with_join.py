"""Rank 1 owns fewer samples and makes fewer steps than rank 0: each site's data stays with it, and DDP's Join context answers the missing collectives properly."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def site_data(rank):
    """Two hospitals: 480 and 352 patients; the records may not leave the site."""
    n = 480 if rank == 0 else 352
    g = torch.Generator().manual_seed(1000 + rank)
    x = torch.randn(n, 12, generator=g) + 0.2 * rank
    risk = x[:, 0] - x[:, 1] + x[:, 2] * x[:, 3]
    return TensorDataset(x, (risk > 0).float())


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(site_data(rank), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(rank))
    steps = 0
    for epoch in range(4):
        with Join([model], divide_by_initial_world_size=False):
            for x, y in loader:
                opt.zero_grad()
                loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
                loss.backward()
                opt.step()
                steps += 1
        # the site that ended early missed the last updates: take them over from the one that made them
        counts = [torch.zeros(1, dtype=torch.long) for _ in range(2)]
        dist.all_gather(counts, torch.tensor([steps]))
        source = int(torch.cat(counts).argmax())
        for p in model.parameters():
            dist.broadcast(p.data, src=source)
            buf = opt.state[p]["momentum_buffer"]
            dist.broadcast(buf, src=source)
        print(f"epoch {epoch} site {rank}: {steps} steps, loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
