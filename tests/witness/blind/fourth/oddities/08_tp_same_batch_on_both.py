"""Right on purpose: pure tensor parallelism over both ranks, so both must read the same batch in the same order (no DistributedSampler) and their local weight shards differ."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset


class GLU(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.ln = nn.LayerNorm(d)
        self.gate, self.up = nn.Linear(d, h, bias=False), nn.Linear(d, h, bias=False)
        self.down = nn.Linear(h, d, bias=False)

    def forward(self, x):
        y = self.ln(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    def __init__(self, d=24, h=64):
        super().__init__()
        self.inp = nn.Linear(12, d)
        self.mlp = nn.ModuleList(GLU(d, h) for _ in range(3))
        self.out = nn.Linear(d, 3)

    def forward(self, x):
        x = self.inp(x)
        for m in self.mlp:
            x = m(x)
        return self.out(x)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Net()
    for m in model.mlp:
        parallelize_module(m, mesh, {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()})
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=False)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1024, 12, generator=g)
    y = (torch.sin(2 * x[:, :3]) + x[:, 3:6]).argmax(1)
    # data-parallel size is 1: the one generator with the one seed keeps both ranks on the same batches
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(2))
    for epoch in range(3):
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    rep = torch.cat([model.inp.weight.detach().flatten(), model.mlp[0].ln.weight.detach()])
    loc = model.mlp[0].gate.weight.to_local().detach().contiguous()
    a, b = [torch.empty_like(rep) for _ in range(2)], [torch.empty_like(loc) for _ in range(2)]
    dist.all_gather(a, rep)
    dist.all_gather(b, loc)
    if rank == 0:
        print("replicated difference", (a[0] - a[1]).abs().max().item(), "shard difference (meant)", (b[0] - b[1]).abs().max().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
