# fault: every few steps accuracy() puts a model with BatchNorm into eval mode, which ends only with the epoch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(512, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
model = DDP(nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2)))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
sampler, test = DistributedSampler(data), torch.randn(64, 8)


@torch.inference_mode()
def accuracy():
    model.eval()
    return (model(test).argmax(1) == (test[:, 0] > 0)).float().mean().item()


for epoch in range(4):
    model.train()
    sampler.set_epoch(epoch)
    for step, (a, b) in enumerate(DataLoader(data, 16, sampler=sampler)):
        loss = nn.functional.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print("step", step, "accuracy", accuracy())
dist.destroy_process_group()
