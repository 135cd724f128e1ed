"""Only rank 0 loads the pretrained weights, and does so after the DDP wrap, so rank 1 trains from other weights."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TextEncoder(nn.Module):
    def __init__(self, vocab=120, dim=32, classes=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.1, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, ids):
        return self.head(self.enc(self.emb(ids)).mean(1))


def make_pretrained(path):
    torch.manual_seed(123)
    torch.save(TextEncoder().state_dict(), path)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    path = os.path.join(tempfile.mkdtemp(), "pretrained.pt")
    if rank == 0:
        make_pretrained(path)

    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 120, (640, 16), generator=g)
    labels = (ids[:, 0] // 30).long()
    ds = TensorDataset(ids, labels)

    model = DDP(TextEncoder())
    if rank == 0:
        model.module.load_state_dict(torch.load(path))
        print("loaded pretrained weights")

    sampler = DistributedSampler(ds, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(ds, batch_size=16, sampler=sampler)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}")

    w = model.module.emb.weight.detach()
    out = [torch.empty_like(w) for _ in range(world)]
    dist.all_gather(out, w)
    if rank == 0:
        print("mean |w_rank0 - w_rank1| of the embedding:", (out[0] - out[1]).abs().mean().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
