# odd: the replicas differ most of the time: this is local SGD, which averages at every tenth step and the end.
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

H = 10


@torch.no_grad()
def average_weights(model):
    for p in model.parameters():
        dist.all_reduce(p)
        p /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # all begin with the same weights
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=56, sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    step = 0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if step % H == 0:
                average_weights(model)
        print(f"rank {dist.get_rank()} epoch {epoch} loss {loss.item():.3f}")
    average_weights(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
