"""The optimizer is built before fully_shard, which replaces the parameters, so its steps change nothing in the model."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, 4, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        h = self.n1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.ff(self.n2(x))


class Tagger(nn.Module):
    def __init__(self, vocab=80, d=32, tags=6, depth=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.out = nn.Linear(d, tags)

    def forward(self, ids):
        h = self.emb(ids)
        for b in self.blocks:
            h = b(h)
        return self.out(h)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    ids = torch.randint(0, 80, (560, 10))
    data = TensorDataset(ids, ids % 6)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)

    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    before = [p.full_tensor().detach().clone() for p in model.parameters()]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if rank == 0:
            print(f"epoch {epoch} mean loss {sum(losses) / len(losses):.4f}")
    change = max((p.full_tensor() - b).abs().max().item() for p, b in zip(model.parameters(), before))
    if rank == 0:
        print("largest change of any weight in the whole training:", change)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
