# Flow matching with an EMA on all ranks (torch's AveragedModel). For the validation all ranks use the EMA, the same
# fixed noise and the same times for every batch, so that the numbers of two epochs can be compared.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Velocity(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, width), nn.ELU(), nn.Linear(width, 4))

    def forward(self, x, t):
        return self.net(torch.cat([x, t], dim=1))


def flow_loss(model, x, noise, t):
    return (model((1 - t) * noise + t * x, t) - (x - noise)).square().mean()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(5)
    everything = TensorDataset(torch.randn(360, 4, generator=g) * 0.1 + torch.randint(0, 2, (360, 1), generator=g))
    train, val = Subset(everything, range(300)), Subset(everything, range(300, 360))
    sampler = DistributedSampler(train, drop_last=True)
    train_loader = DataLoader(train, 10, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), 10)  # disjoint, nothing padded
    torch.manual_seed(rank)
    model = DDP(Velocity())
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    fixed_noise, fixed_t = torch.randn(10, 4, generator=g), torch.linspace(0.05, 0.95, 10)[:, None]
    for epoch in range(4):
        sampler.set_epoch(epoch)
        model.train()
        for (x,) in train_loader:
            loss = flow_loss(model, x, torch.randn_like(x), torch.rand(len(x), 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update_parameters(model.module)
        ema.eval()
        with torch.no_grad():
            total = sum(flow_loss(ema, x, fixed_noise, fixed_t) for (x,) in val_loader)
        dist.all_reduce(total)
        if rank == 0:
            print(epoch, total.item() / len(val_loader) / world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
