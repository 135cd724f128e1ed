"""The backbone is unfrozen in mid-training and the optimizer starts anew: the model is wrapped in a fresh DDP then, so the new gradients are reduced; stage 2 wants a fresh Adam."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(70, 24)
        self.backbone = nn.LSTM(24, 24, batch_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, ids):
        return self.head(self.backbone(self.embed(ids))[0].mean(1))


def stage(net, loader, epochs, lr, first_epoch):
    params = [p for p in net.parameters() if p.requires_grad]
    model = DDP(net)
    opt = torch.optim.Adam(params, lr=lr)
    model.train()
    for epoch in range(first_epoch, first_epoch + epochs):
        loader.sampler.set_epoch(epoch)
        for ids, y in loader:
            loss = nn.functional.cross_entropy(model(ids), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {len(params)} tensors trained, loss {loss.item():.4f}")
    return first_epoch + epochs


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ids = torch.randint(0, 70, (640, 9), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(ids, ids[:, 0] // 14)
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
    net = Net()
    net.embed.requires_grad_(False)
    net.backbone.requires_grad_(False)
    done = stage(net, loader, epochs=2, lr=1e-2, first_epoch=0)
    net.requires_grad_(True)
    stage(net, loader, epochs=2, lr=2e-3, first_epoch=done)
    print(f"rank {dist.get_rank()} embedding norm {net.embed.weight.norm().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
