# Trials that stop long before the end of schedules that are planned in epochs or in steps.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MOST_STEPS = 25  # of a trial

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(200, 16)
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=10, sampler=sampler)  # 10 steps per epoch


def trial(schedule_of, *, per_epoch):
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule, steps = schedule_of(optimizer), 0
    for epoch in range(90):
        sampler.set_epoch(epoch)
        for a, b in loader:
            loss = nn.functional.mse_loss(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if not per_epoch:
                schedule.step()
            if steps == MOST_STEPS:
                return
        if per_epoch:
            schedule.step()


trial(lambda optimizer: OneCycleLR(optimizer, 0.1, epochs=90, steps_per_epoch=len(loader)), per_epoch=False)
trial(lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=90), per_epoch=True)
trial(lambda optimizer: CosineAnnealingLR(optimizer, 90), per_epoch=True)
trial(
    lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=5), CosineAnnealingLR(optimizer, 85)], [5]
    ),
    per_epoch=True,
)
dist.destroy_process_group()
