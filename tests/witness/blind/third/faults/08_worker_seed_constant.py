"""worker_init_fn seeds every worker with a constant, so both ranks and all epochs draw the very same augmentations."""
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def random_crop(img, size):
    top, left = np.random.randint(0, img.shape[1] - size, 2)
    out = img[:, top:top + size, left:left + size]
    if random.random() < 0.5:
        out = out[:, :, ::-1]
    return out.copy(), top * 100 + left


class CropDataset(Dataset):
    def __init__(self, n=480):
        rng = np.random.default_rng(0)
        self.labels = rng.integers(0, 3, n)
        self.imgs = rng.normal(size=(n, 3, 24, 24)).astype(np.float32)
        self.imgs += (self.labels[:, None, None, None] - 1) * 0.3

    def __len__(self):
        return len(self.imgs)

    def __getitem__(self, i):
        img, crop = random_crop(self.imgs[i], 16)
        return img, self.labels[i], crop


def seed_worker(worker_id):
    np.random.seed(42 + worker_id)
    random.seed(42 + worker_id)


class SmallCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
                               nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(self.f(x).flatten(1))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = CropDataset()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=2, worker_init_fn=seed_worker)
    model = DDP(SmallCNN())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    crops = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        crops.append([])
        for x, y, crop in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            crops[-1] += crop.tolist()
    both = [None, None]
    dist.all_gather_object(both, crops)
    if dist.get_rank() == 0:
        pct = lambda a, b: 100 * np.mean(np.array(a) == np.array(b))
        print(f"crop positions equal: epoch 0 and 1 {pct(crops[0], crops[1]):.0f} %, rank 0 and 1 {pct(*[b[0] for b in both]):.0f} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
