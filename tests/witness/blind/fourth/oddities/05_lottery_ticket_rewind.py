"""Right on purpose: lottery-ticket pruning, after each round the weights are set back to their initial values, 60 % of them are held at zero by masks, and the optimizer starts afresh."""
import copy
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def prunable(model):
    return {n: p for n, p in model.named_parameters() if p.ndim > 1}


def global_magnitude_masks(model, masks, keep):
    alive = torch.cat([p.detach().abs()[masks[n].bool()] for n, p in prunable(model).items()])
    thr = alive.kthvalue(max(1, int((1 - keep) * alive.numel()))).values
    return {n: masks[n] * (p.detach().abs() > thr) for n, p in prunable(model).items()}


def apply_masks(model, masks):
    with torch.no_grad():
        for n, p in prunable(model).items():
            p.mul_(masks[n])


def train_round(net, masks, loader, sampler, epochs, tag):
    ddp = DDP(net)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(ddp(x), y)
            opt.zero_grad()
            loss.backward()
            for n, p in prunable(net).items():
                p.grad.mul_(masks[n])
            opt.step()
            apply_masks(net, masks)
    if dist.get_rank() == 0:
        n = sum(m.sum().item() for m in masks.values()) / sum(m.numel() for m in masks.values())
        print(f"{tag}: kept {n:.2f} loss {loss.item():.3f}")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    g = torch.Generator().manual_seed(5)
    y = torch.randint(0, 8, (800,), generator=g)
    x = torch.randn(8, 40, generator=g)[y] + torch.randn(800, 40, generator=g)
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=20, sampler=sampler)
    net = nn.Sequential(nn.Linear(40, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 8))
    init = copy.deepcopy(net.state_dict())
    masks = {n: torch.ones_like(p) for n, p in prunable(net).items()}
    train_round(net, masks, loader, sampler, 2, "dense")
    for r in range(2):
        masks = global_magnitude_masks(net, masks, keep=0.63)
        net.load_state_dict(init)                 # rewind: the winning ticket starts from its own init
        apply_masks(net, masks)
        train_round(net, masks, loader, sampler, 2, f"round {r + 1}")
    zeros = sum((p == 0).sum().item() for p in prunable(net).values())
    if dist.get_rank() == 0:
        print(f"weights exactly zero on purpose: {zeros}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
