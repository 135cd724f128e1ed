"""The ranks' own sampler uses the rank only to seed its draws, of which accelerate takes each rank's."""
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Draws:
    def __init__(self, size, rank, world_size):
        self.size, self.rank, self.world_size, self.epoch = size, rank, world_size, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch * self.world_size + self.rank)
        self.epoch += 1
        return iter(torch.randperm(self.size, generator=generator).tolist())


accelerator = Accelerator(cpu=True)
x = torch.randn(320, 6, generator=torch.Generator().manual_seed(1))
sampler = Draws(len(x), accelerator.process_index, accelerator.num_processes)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, sampler=sampler)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(3):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
accelerator.end_training()
