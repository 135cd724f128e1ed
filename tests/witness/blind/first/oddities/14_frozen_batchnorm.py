# odd: batch normalisation stays in eval mode and is not trained, although the rest is: batches are small.
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ConvNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(32 * 4 * 4, classes)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


class FineTuned(ConvNet):
    """Keeps its batch normalisations as they were pretrained."""

    def freeze_norms(self):
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.requires_grad_(False)
        return self.train()

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


def train(net, data, batch_size, epochs, lr):
    model = DDP(net)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=lr)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler, drop_last=True)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(f"{type(net).__name__}: loss {loss.item():.3f}")
    # DDP keeps the running statistics of rank 0, which it hands out before each forward pass but not after the last.
    for buffer in net.buffers():
        dist.broadcast(buffer, 0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, digit = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    digit = torch.tensor(digit)

    source = ConvNet(10)
    train(source, TensorDataset(images[:1400], digit[:1400]), batch_size=50, epochs=2, lr=3e-3)

    target = FineTuned(2)
    target.features.load_state_dict(source.features.state_dict())
    target.freeze_norms()
    before = target.features[1].running_mean.clone()
    train(target, TensorDataset(images[1400:], digit[1400:] % 2), batch_size=8, epochs=1, lr=2e-3)
    assert torch.equal(before, target.features[1].running_mean)
    dist.destroy_process_group()
