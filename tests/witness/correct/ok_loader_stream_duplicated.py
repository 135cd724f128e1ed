# corrected: each worker of each rank reads its own part of the stream
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Lines(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        first = dist.get_rank() * worker.num_workers + worker.id
        for i in range(first, 256, dist.get_world_size() * worker.num_workers):
            g = torch.Generator().manual_seed(i)
            yield torch.randn(16, generator=g), torch.tensor([float(i)]), i


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
loader = DataLoader(Lines(), batch_size=16, num_workers=2)
model = DDP(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
seen = []
for a, b, i in loader:
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seen += i.tolist()
every = [None] * dist.get_world_size()
dist.all_gather_object(every, seen)
if rank == 0:
    print("samples trained on in one epoch:", sum(map(len, every)), "of", len(set(sum(every, []))), "different ones")
dist.destroy_process_group()
