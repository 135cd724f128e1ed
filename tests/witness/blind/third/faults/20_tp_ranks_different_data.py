"""The two ranks of a tensor-parallel group take different batches (DistributedSampler), so partial products of different samples are summed."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MLPBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, d=24, classes=5):
        super().__init__()
        self.inp = nn.Linear(16, d)
        self.blocks = nn.ModuleList(MLPBlock(d) for _ in range(2))
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = b(h)
        return self.head(h)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    x = torch.randn(800, 16)
    data = TensorDataset(x, x[:, :5].argmax(1))
    model = Net()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, foreach=False)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"rank {rank} epoch {epoch} loss {loss.item():.4f}")
    w = model.head.weight.detach()
    ws = [torch.empty_like(w) for _ in range(2)]
    dist.all_gather(ws, w)
    if rank == 0:
        print("relative difference of the replicated head between the TP ranks:", ((ws[0] - ws[1]).norm() / w.norm()).item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
