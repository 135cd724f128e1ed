# fault: sampler.set_epoch() is never called, so that each epoch goes through the data in the very same order and in the same batches although shuffling is on.
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, BATCH = 6, 64

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(int(os.environ.get("SEED", 0)))

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
train = TensorDataset(images[:1500], torch.tensor(digits.target[:1500]))
sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, drop_last=True)
loader = DataLoader(train, batch_size=BATCH, sampler=sampler, num_workers=0)

net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(32 * 4, 10),
)  # fmt: skip
net = DistributedDataParallel(net)
opt = torch.optim.SGD(net.parameters(), lr=0.05 * world, momentum=0.9)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=EPOCHS)
criterion = nn.CrossEntropyLoss()

for epoch in range(EPOCHS):
    total = 0.0
    for x, y in loader:
        opt.zero_grad(set_to_none=True)
        loss = criterion(net(x), y)
        loss.backward()
        opt.step()
        total += loss.item()
    sched.step()
    if rank == 0:
        print(f"[{epoch}] loss={total / len(loader):.4f} lr={sched.get_last_lr()[0]:.4f}", flush=True)

dist.destroy_process_group()
