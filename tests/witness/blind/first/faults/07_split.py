# fault: random_split draws from a generator that is seeded differently on each rank, so that most of what one rank holds out is trained on by the other, and the validation accuracy is that of seen data.
import random

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)], dtype=torch.float)
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


dist.init_process_group("gloo")
rank = dist.get_rank()
seed_everything(100 + rank)  # other dropout masks and augmentation on each rank

x, y = load_digits(return_X_y=True)
x = torch.tensor(x, dtype=torch.float32) / 16
full = TensorDataset(x, torch.tensor(y))
train_set, val_set = random_split(full, [1400, len(full) - 1400])
train_sampler = DistributedSampler(train_set, drop_last=True)
train_loader = DataLoader(train_set, batch_size=50, sampler=train_sampler)
val_loader = DataLoader(val_set, batch_size=100, sampler=DistributedSampler(val_set, shuffle=False))

model = DDP(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(5):
    train_sampler.set_epoch(epoch)
    for images, labels in train_loader:
        noisy = images + 0.05 * torch.randn_like(images)
        loss = nn.functional.cross_entropy(model(noisy), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    acc = validate(model, val_loader)
    if rank == 0:
        print(f"epoch {epoch}: val acc {acc:.3f}")
dist.destroy_process_group()
