# fault: a validation in the middle of an epoch leaves the model in eval mode for the rest of it
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
test = TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
test_loader = DataLoader(test, batch_size=16, sampler=DistributedSampler(test, shuffle=False))
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
without = 0


def validate():
    model.eval()
    with torch.no_grad():
        score = torch.stack([F.mse_loss(model(a), b) for a, b in test_loader]).mean()
    dist.all_reduce(score)
    return score.item() / dist.get_world_size()


for epoch in range(5):
    sampler.set_epoch(epoch)
    model.train()
    for i, (a, b) in enumerate(loader):
        without += not model.training
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i == 2:
            score = validate()
print("rank", rank, "steps without dropout:", without, "of 40, test loss", round(score, 4))
dist.destroy_process_group()
