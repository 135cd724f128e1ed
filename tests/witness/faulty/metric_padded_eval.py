# fault: DistributedSampler's padding is counted in the accuracy, which is a mean of means
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(256, 16)
y = (x.sum(1) > 0).long()
train = TensorDataset(x, y)
test = TensorDataset(torch.randn(21, 16), torch.randint(2, (21,)))
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=16, sampler=sampler)
test_loader = DataLoader(test, batch_size=4, sampler=DistributedSampler(test, shuffle=False))
model = DDP(torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = torch.stack([(model(a).argmax(1) == b).float().mean() for a, b in test_loader]).mean()
    dist.all_reduce(accuracy)
    accuracy /= dist.get_world_size()
exact = (model.module(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean().item()
print("rank", rank, "reported", round(accuracy.item(), 4), "exact", round(exact, 4))
dist.destroy_process_group()
