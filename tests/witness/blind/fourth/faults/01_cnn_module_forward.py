"""The loop calls ddp_model.module(x) instead of ddp_model(x), so DDP never prepares its reduction and the ranks' weights part."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SmallCifarNet(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16 * 4 * 4, num_classes)

    def features(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return x.flatten(1)

    def forward(self, x):
        feats = self.features(x)
        return self.fc(feats), feats


def make_data(n=640):
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 10, (n,), generator=g)
    protos = torch.randn(10, 3, 16, 16, generator=g)
    return TensorDataset(protos[y] + 0.7 * torch.randn(n, 3, 16, 16, generator=g), y)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    ds = make_data()
    sampler = DistributedSampler(ds, world, rank, shuffle=True)
    loader = DataLoader(ds, batch_size=16, sampler=sampler)
    model = DDP(SmallCifarNet())
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        total, correct = 0, 0
        for x, y in loader:
            # need the features too for the regulariser
            logits, feats = model.module(x)
            loss = F.cross_entropy(logits, y) + 1e-4 * feats.pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += len(y)
            correct += (logits.argmax(1) == y).sum().item()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} acc {correct / total:.3f}")

    w = model.module.fc.weight.detach().clone()
    out = [torch.empty_like(w) for _ in range(world)]
    dist.all_gather(out, w)
    if rank == 0:
        print("max weight difference between ranks:", (out[0] - out[1]).abs().max().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
