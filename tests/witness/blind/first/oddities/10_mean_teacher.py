# odd: the teacher has no gradient, optimizer or DDP and yet changes: it is the student's moving average.
import copy

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
labelled = torch.arange(len(x)) % 5 == 0  # labels are known for one image in five
data = TensorDataset(x, y.masked_fill(~labelled, -100))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=64, sampler=sampler, drop_last=True)

student = DDP(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)))
teacher = copy.deepcopy(student.module).requires_grad_(False)
optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
torch.manual_seed(rank)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        logits = student(images + 0.1 * torch.randn_like(images))
        target = teacher(images + 0.1 * torch.randn_like(images)).softmax(1)
        consistency = (logits.softmax(1) - target).square().mean()
        loss = nn.functional.cross_entropy(logits, labels, ignore_index=-100) + 5.0 * consistency
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.mul_(0.95).add_(s, alpha=0.05)
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f} teacher {(teacher(x).argmax(1) == y).float().mean():.3f}")
dist.destroy_process_group()
