"""Right on purpose: ranks have unequal amounts of data (no padding, no dropping) and the Join context lets the shorter rank shadow the collectives until the longer one is done."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


class SpeakerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.tdnn = nn.Sequential(nn.Conv1d(8, 24, 5), nn.ReLU(), nn.Conv1d(24, 24, 3, dilation=2), nn.ReLU())
        self.fc = nn.Linear(48, 6)

    def forward(self, x):
        h = self.tdnn(x)
        return self.fc(torch.cat([h.mean(2), h.std(2)], 1))


def corpus(rank):
    """Recordings lie where they were made: site 0 has 900, site 1 only 560."""
    g = torch.Generator().manual_seed(0)
    proto = torch.randn(6, 8, 1, generator=g)
    g.manual_seed(1 + rank)
    n = 900 if rank == 0 else 560
    y = torch.randint(0, 6, (n,), generator=g)
    return TensorDataset(proto[y] + torch.randn(n, 8, 30, generator=g), y)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(SpeakerNet())
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)
    loader = DataLoader(corpus(rank), batch_size=20, shuffle=True, generator=torch.Generator().manual_seed(rank))
    steps = 0
    for epoch in range(2):
        with Join([model, opt], throw_on_early_termination=False):
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                steps += 1
        print(f"[site {rank}] epoch {epoch} batches {len(loader)} loss {loss.item():.4f}")
    w = torch.cat([p.detach().flatten() for p in model.parameters()])
    both, n = [torch.empty_like(w) for _ in range(2)], [None, None]
    dist.all_gather(both, w)
    dist.all_gather_object(n, steps)
    if rank == 0:
        print(f"own steps of the ranks {n} (unequal on purpose), weight difference {(both[0] - both[1]).abs().max().item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
