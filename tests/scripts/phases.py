"""A loop that says nothing about itself: a slow first step, a few quick ones, a slow evaluation."""

import time

import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(16, 4))
time.sleep(2)
for i, (x,) in enumerate(DataLoader(data, batch_size=4)):
    if i == 0:
        time.sleep(3)
    model(x).square().mean().backward()
    optimizer.step()
with torch.no_grad():
    for (x,) in DataLoader(data, batch_size=4):
        time.sleep(1)
        model(x)
