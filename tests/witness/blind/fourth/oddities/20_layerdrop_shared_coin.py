"""Right on purpose: LayerDrop, whole transformer layers get no gradient in many steps, chosen by a coin all ranks share, and the saved model keeps only every other layer."""
import os
import tempfile
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class LayerDropEncoder(nn.Module):
    def __init__(self, vocab=40, d=32, n=4, p=0.4):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Parameter(torch.zeros(16, d))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
                                    for _ in range(n))
        self.head = nn.Linear(d, vocab)
        self.p, self.coin, self.used = p, torch.Generator().manual_seed(4242), [0] * n

    def forward(self, ids):
        x = self.emb(ids) + self.pos
        keep = torch.rand(len(self.layers), generator=self.coin) >= self.p if self.training else [True] * len(self.layers)
        for i, layer in enumerate(self.layers):
            if keep[i]:
                self.used[i] += 1
                x = layer(x)
        return self.head(x)


def mlm_batch(g, B=16, T=16):
    start, stride = torch.randint(0, 40, (B, 1), generator=g), torch.randint(1, 4, (B, 1), generator=g)
    ids = 1 + (start + stride * torch.arange(T)) % 39
    mask = torch.rand(B, T, generator=g) < 0.2
    return ids.masked_fill(mask, 0), ids.masked_fill(~mask, -100)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(LayerDropEncoder(), find_unused_parameters=True)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    g = torch.Generator().manual_seed(30 + rank)
    for step in range(80):
        x, y = mlm_batch(g)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}")
    if rank == 0:
        net = model.module.eval()
        sub = {k: v for k, v in net.state_dict().items() if not k.startswith(("layers.1.", "layers.3."))}
        with tempfile.TemporaryDirectory() as d:
            torch.save(sub, os.path.join(d, "pruned.pt"))
            small = LayerDropEncoder(n=4)
            small.layers = nn.ModuleList([small.layers[0], small.layers[2]])
            st = torch.load(os.path.join(d, "pruned.pt"))
            small.load_state_dict({k.replace("layers.2.", "layers.1."): v for k, v in st.items()})
            small.eval()
        x, y = mlm_batch(torch.Generator().manual_seed(999), B=64)
        with torch.no_grad():
            a, b = (F.cross_entropy(m(x).flatten(0, 1), y.flatten()).item() for m in (net, small))
        print(f"layer use of 80 steps {net.used[:]}, loss full {a:.3f}, half depth {b:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
