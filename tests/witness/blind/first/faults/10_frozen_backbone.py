# fault: backbone.requires_grad = False only sets an attribute of the module and freezes no parameter, so that the pretrained backbone is trained along with the head.
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class DigitNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(32 * 4, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def fit(model, dataset, epochs, lr):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    ddp = DDP(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    small = y < 5

    pretrained = DigitNet(5)
    fit(pretrained, TensorDataset(x[small], y[small]), epochs=2, lr=0.05)

    # Transfer to the digits 5 to 9: keep the features, train a new head.
    model = DigitNet(5)
    model.backbone.load_state_dict(pretrained.backbone.state_dict())
    model.backbone.requires_grad = False
    fit(model, TensorDataset(x[~small], y[~small] - 5), epochs=3, lr=0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
