# corrected: the optimizer is made after the adapters and the freezing, of what is trained.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Adapted(nn.Module):
    """A frozen layer with a low-rank matrix beside it."""

    def __init__(self, layer, rank=4):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, rank), nn.Linear(rank, layer.out_features)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    data = TensorDataset(x, (x[:, :3].sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 2))
    for place in (0, 2):
        model[place] = Adapted(model[place])
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05, momentum=0.9)
    model = DDP(model)
    sampler = DistributedSampler(data)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data, batch_size=16, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
