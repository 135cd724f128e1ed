# odd: one rank makes more steps, as its file is longer and no sampler evens them out: DDP's join is for this.
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

RECORDS = {0: 640, 1: 512}


def read_file(rank):
    g = torch.Generator().manual_seed(50 + rank)  # each rank has the file of one hospital
    x = torch.randn(RECORDS[rank], 12, generator=g)
    w = torch.linspace(-1, 1, 12)
    return TensorDataset(x, (x @ w + 0.3 * torch.randn(len(x), generator=g) > 0).float())


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
loader = DataLoader(read_file(rank), batch_size=32, shuffle=True)
model = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    with Join([model]):
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"rank {rank} epoch {epoch} steps {len(loader)} loss {loss.item():.3f}")
dist.destroy_process_group()
