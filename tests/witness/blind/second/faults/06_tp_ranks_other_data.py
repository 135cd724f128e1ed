"""The model is tensor parallel over both ranks but the DistributedSampler splits the data over them, so each row-parallel sum mixes two different batches."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Classifier(nn.Module):
    def __init__(self, dim=40, depth=3, classes=8):
        super().__init__()
        self.stem = nn.Linear(20, dim)
        self.ffn = nn.ModuleList(FeedForward(dim, 160) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.stem(x)
        for norm, ffn in zip(self.norms, self.ffn):
            x = x + ffn(norm(x))
        return self.head(x)


def get_loader(rank, world, n=600):
    g = torch.Generator().manual_seed(17)
    y = torch.randint(0, 8, (n,), generator=g)
    x = torch.randn(8, 20, generator=g)[y] + torch.randn(n, 20, generator=g) * 0.6
    ds = TensorDataset(x, y, torch.arange(n))
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank, shuffle=True, seed=1)
    return DataLoader(ds, batch_size=20, sampler=sampler), sampler


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    tp_mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Classifier()
    for ffn in model.ffn:
        parallelize_module(ffn, tp_mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    loader, sampler = get_loader(rank, world)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    mixed = steps = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y, idx in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            steps += 1
            seen = [torch.empty_like(idx) for _ in range(world)]
            dist.all_gather(seen, idx)
            mixed += int(not torch.equal(seen[0], seen[1]))
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}")
    head = [torch.empty_like(model.head.weight) for _ in range(world)]
    dist.all_gather(head, model.head.weight.detach())
    if rank == 0:
        print(f"steps whose tensor-parallel ranks saw different samples: {mixed} of {steps}")
        print(f"replicated head differs between ranks by {(head[0] - head[1]).abs().max():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
