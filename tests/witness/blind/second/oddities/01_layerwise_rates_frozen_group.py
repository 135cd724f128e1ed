"""Every layer has its own learning rate, and the lowest group's is exactly 0 in the first epochs: layer-wise decay with a staged start, on purpose; right."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TextNet(nn.Module):
    def __init__(self, vocab=90, d=32, depth=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(d, 4, 64, 0.1, batch_first=True) for _ in range(depth))
        self.head = nn.Linear(d, 4)

    def forward(self, x):
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h.mean(1))


def layerwise_groups(model, base=2e-3, decay=0.5, wd=0.05):
    stages = [model.embed, *model.layers, model.head]
    groups = []
    for depth, stage in enumerate(stages):
        lr = base * decay ** (len(stages) - 1 - depth)
        named = list(stage.named_parameters())
        groups.append({"params": [p for n, p in named if p.ndim > 1], "lr": lr, "weight_decay": wd, "depth": depth})
        plain = [p for n, p in named if p.ndim <= 1]
        if plain:
            groups.append({"params": plain, "lr": lr, "weight_decay": 0.0, "depth": depth})
    return groups


def staged(depth):
    # the embedding waits two epochs, the first layer one, the rest starts at once
    wait = max(0, 2 - depth)
    return lambda epoch: 0.0 if epoch < wait else 0.9 ** (epoch - wait)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    x = torch.randint(0, 90, (640, 10), generator=g)
    ds = TensorDataset(x, (x[:, 0] // 23).clamp(max=3))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 32, sampler=sampler)
    net = TextNet()
    groups = layerwise_groups(net)
    model = DDP(net)
    opt = torch.optim.AdamW(groups)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, [staged(grp["depth"]) for grp in groups])
    torch.manual_seed(100 + dist.get_rank())     # dropout of its own on each rank
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} lrs", " ".join(f"{grp['lr']:.1e}" for grp in opt.param_groups))
        sched.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
