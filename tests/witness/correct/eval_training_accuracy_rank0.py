# Rank 0 alone measures the accuracy on the training set (all of it, also what the other rank trains on) and on the
# test set, with a plain loader; the others wait in the barrier. It is called training accuracy, so nothing leaks.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


@torch.no_grad()
def accuracy(model, data):
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(data, 32))
    model.train()
    return right / len(data)


dist.init_process_group("gloo")
g = torch.Generator().manual_seed(0)
x = torch.randn(300, 10, generator=g)
data = TensorDataset(x, (x[:, :3].sum(1) > 0).long())
train, test = random_split(data, [240, 60], generator=torch.Generator().manual_seed(42))
torch.manual_seed(dist.get_rank())
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
sampler = DistributedSampler(train)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(train, 12, sampler=sampler):
        loss = nn.functional.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(epoch, f"train {accuracy(model.module, train):.2f} test {accuracy(model.module, test):.2f}")
    dist.barrier()
dist.destroy_process_group()
