"""The optimizer is built before fully_shard, which swaps the parameters for DTensors, so the optimizer holds stale tensors and the weights never move."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, 4, batch_first=True)
        self.norm2 = nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x, mask):
        h = self.norm(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.ff(self.norm2(x))


class LM(nn.Module):
    def __init__(self, vocab=50, d=32, n=3, T=24):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(T, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(n))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        T = ids.size(1)
        mask = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
        x = self.tok(ids) + self.pos(torch.arange(T))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def build(lr):
    torch.manual_seed(0)
    model = LM()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1},
                             {"params": rest, "weight_decay": 0.0}], lr=lr)
    return model, opt


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, opt = build(lr=3e-3)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, total_iters=10)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = model.head.weight.full_tensor().clone()

    g = torch.Generator().manual_seed(rank)
    for step in range(45):
        start = torch.randint(0, 50, (8, 1), generator=g)
        ids = (start + 3 * torch.arange(25)) % 50
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        opt.step()
        sched.step()
        model.zero_grad()
        if rank == 0 and step % 15 == 0:
            print(f"step {step} loss {loss.item():.3f} lr {sched.get_last_lr()[0]:.2e}")

    moved = (model.head.weight.full_tensor() - before).abs().max().item()
    if rank == 0:
        print("head weight moved by (should be > 0):", moved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
