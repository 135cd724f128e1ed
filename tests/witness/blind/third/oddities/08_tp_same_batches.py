"""Both ranks read the very same batches and reduce no gradients: they are one tensor-parallel group, whose members must see the same data."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset


class FFN(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.w1, self.w2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.w2(nn.functional.silu(self.w1(self.norm(x))))


class Model(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.emb = nn.Embedding(100, d)
        self.ffn1, self.ffn2 = FFN(d), FFN(d)
        self.out = nn.Linear(d, 10)

    def forward(self, ids):
        return self.out(self.ffn2(self.ffn1(self.emb(ids).mean(1))))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tp = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Model()
    plan = {f"ffn{i}.{w}": s for i in (1, 2) for w, s in (("w1", ColwiseParallel()), ("w2", RowwiseParallel()))}
    parallelize_module(model, tp, plan)
    ids = torch.randint(0, 100, (600, 8))
    data = TensorDataset(ids, ids[:, 0] // 10)
    loader = DataLoader(data, batch_size=30, shuffle=True, generator=torch.Generator().manual_seed(5))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    for epoch in range(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"rank {rank} epoch {epoch} loss {loss.item():.6f}")
    print(f"rank {rank} embedding norm {model.emb.weight.norm().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
