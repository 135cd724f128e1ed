"""Both ranks read the very same batches in the same order without a DistributedSampler: the model is tensor parallel over them, so they must."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset


class GatedMLP(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Ranker(nn.Module):
    def __init__(self, n_items=150, dim=32):
        super().__init__()
        self.item = nn.Embedding(n_items, dim)
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(GatedMLP(dim, 96), GatedMLP(dim, 96))
        self.out = nn.Linear(dim, n_items)

    def forward(self, history):
        h = self.item(history).mean(1)
        for block in self.mlp:
            h = h + block(self.norm(h))
        return self.out(h)


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(66)                       # one seed: replicated parts and data order must agree
    model = Ranker()
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.mlp:
        parallelize_module(block, mesh, plan)
    g = torch.Generator().manual_seed(5)
    first = torch.randint(0, 140, (600, 1), generator=g)
    history = first + torch.randint(0, 5, (600, 6), generator=g)
    ds = TensorDataset(history, (first + 7).squeeze(1) % 150)
    loader = DataLoader(ds, batch_size=40, shuffle=True, generator=torch.Generator().manual_seed(6))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(4):
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} mean loss {total / len(loader):.4f}")
    gap = 0.0
    for p in (model.item.weight, model.norm.weight, model.out.weight):
        ref = p.detach().clone()
        dist.broadcast(ref, src=0)
        gap = max(gap, (ref - p).abs().max().item())
    print(f"rank {dist.get_rank()}: replicated weights off rank 0 by {gap:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
