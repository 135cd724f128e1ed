# fault: the moving average copies the parameters but no buffers, so that the averaged model, which is what is evaluated, keeps the running statistics that batch normalisation begins with.
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ModelEMA:
    def __init__(self, model, decay=0.95):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for ema_p, p in zip(self.module.parameters(), model.parameters(), strict=True):
            ema_p.lerp_(p, 1 - self.decay)


def conv_bn(c_in, c_out):
    return nn.Sequential(nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    d = load_digits()
    x, y = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1), torch.tensor(d.target)
    train, test = TensorDataset(x[:1437], y[:1437]), TensorDataset(x[1437:], y[1437:])

    net = nn.Sequential(
        conv_bn(1, 16), nn.MaxPool2d(2), conv_bn(16, 32), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )
    model = DDP(net)
    ema = ModelEMA(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=64, sampler=sampler, drop_last=True)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for images, target in loader:
            loss = nn.functional.cross_entropy(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(net)

    if dist.get_rank() == 0:
        with torch.no_grad():
            accuracy = (ema.module(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean()
        print(f"loss {loss.item():.3f}, EMA accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
