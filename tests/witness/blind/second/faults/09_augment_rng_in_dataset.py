"""The dataset owns a numpy Generator that every rank and every worker copies anew each epoch, so the 'random' crops repeat over epochs, workers and ranks."""
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class CroppedImages(Dataset):
    def __init__(self, n=256, size=16, crop=12, seed=0):
        self.rng = np.random.default_rng(seed)
        base = np.random.default_rng(123)
        self.labels = base.integers(0, 4, n)
        shapes = base.normal(size=(4, 3, size, size))
        self.images = (shapes[self.labels] + base.normal(size=(n, 3, size, size))).astype(np.float32)
        self.span, self.crop = size - crop + 1, crop

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        top, left = self.rng.integers(0, self.span, 2)
        flip = self.rng.random() < 0.5
        img = self.images[i][:, top : top + self.crop, left : left + self.crop]
        if flip:
            img = img[:, :, ::-1]
        jitter = self.rng.normal(0, 0.1)
        return torch.from_numpy(img.copy()) + float(jitter), int(self.labels[i]), float(jitter)


def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4),
    )


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
dataset = CroppedImages()
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=2)
net = nn.parallel.DistributedDataParallel(convnet())
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
draws = []
for epoch in range(4):
    sampler.set_epoch(epoch)
    net.train()
    for images, labels, jitter in loader:
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        draws += jitter.tolist()
    if rank == 0:
        print(f"epoch {epoch} loss {loss.item():.3f}")
everyone = [None] * world
dist.all_gather_object(everyone, draws)
if rank == 0:
    values = sum(everyone, [])
    print(f"augmentations drawn: {len(values)}, different ones: {len(set(values))}")
dist.destroy_process_group()
