# An IterableDataset that is split by rank and by loader worker.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))

from torch.utils.data import IterableDataset, get_worker_info


class S(IterableDataset):
    def __iter__(s):
        w = get_worker_info()
        n, k = (w.num_workers, w.id) if w else (1, 0)
        for i in range(rank * n + k, 512, world * n):
            yield data[i]


loader = DataLoader(S(), 16, num_workers=2)
model = DDP(nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), 0.05)
for epoch in range(2):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
