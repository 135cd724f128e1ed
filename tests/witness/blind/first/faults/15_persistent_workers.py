# fault: the dataset is told the epoch in the main process, but the persistent workers keep the copy they were given at the start, so that each epoch augments every image in the same way.
import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class AugmentedDigits(Dataset):
    """Digits with a random shift and noise, reproducible from (epoch, index)."""

    def __init__(self):
        digits = load_digits()
        self.images = np.pad(digits.images.astype(np.float32) / 16, ((0, 0), (1, 1), (1, 1)))
        self.labels = digits.target
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        rng = np.random.default_rng((self.epoch, index))
        dy, dx = rng.integers(0, 3, size=2)
        image = self.images[index, dy : dy + 8, dx : dx + 8]
        image = image + rng.normal(0, 0.1, image.shape).astype(np.float32)
        return {"image": torch.from_numpy(image), "label": self.labels[index]}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = AugmentedDigits()
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=1, persistent_workers=True)
    model = DDP(nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(5):
        dataset.set_epoch(epoch)
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
