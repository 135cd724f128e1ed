"""Right on purpose: a DDP hook sends only each rank's largest 5 % of gradient entries and keeps the rest as a rank-local residual (deep gradient compression with error feedback)."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TopKState:
    def __init__(self, ratio):
        self.ratio, self.residual = ratio, {}


def topk_hook(state, bucket):
    flat = bucket.buffer()
    key = tuple(p.data_ptr() for p in bucket.parameters())
    acc = flat + state.residual.get(key, torch.zeros_like(flat))
    k = max(1, int(acc.numel() * state.ratio))
    idx = acc.abs().topk(k).indices
    sparse = torch.zeros_like(acc)
    sparse[idx] = acc[idx]
    state.residual[key] = acc - sparse
    sparse /= dist.get_world_size()
    fut = dist.all_reduce(sparse, async_op=True).get_future()
    return fut.then(lambda f: f.value()[0])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 10, (960,), generator=g)
    x = torch.randn(10, 1, 12, 12, generator=g)[y] + 0.7 * torch.randn(960, 1, 12, 12, generator=g)
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=16, sampler=sampler)
    net = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1),
                        nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10))
    model = DDP(net)
    state = TopKState(0.05)
    model.register_comm_hook(state, topk_hook)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            res = sum(r.norm().item() for r in state.residual.values())
            print(f"epoch {epoch} loss {loss.item():.3f} residual norm {res:.3f}")
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    if rank == 0:
        print("weights equal on both ranks:", torch.equal(*both))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
