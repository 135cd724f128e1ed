"""The streaming dataset splits by DataLoader worker only and not by rank, so both ranks train on exactly the same documents."""
import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

VOCAB, BLOCK = 64, 32


class TokenStream(IterableDataset):
    """Streams packed documents; 'shards' stand in for tar/parquet files."""

    def __init__(self, num_shards=8, docs_per_shard=64):
        self.num_shards, self.docs_per_shard = num_shards, docs_per_shard

    def __iter__(self):
        info = get_worker_info()
        wid, n = (info.id, info.num_workers) if info else (0, 1)
        for shard in range(wid, self.num_shards, n):
            g = torch.Generator().manual_seed(1000 + shard)
            for _ in range(self.docs_per_shard):
                start, step = torch.randint(0, VOCAB, (2,), generator=g).tolist()
                ids = (start + (step % 5 + 1) * torch.arange(BLOCK + 1)) % VOCAB
                yield ids[:-1], ids[1:]


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.h, C // self.h).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, d=48, h=4, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, d), nn.Embedding(BLOCK, d)
        self.blocks = nn.ModuleList(Block(d, h) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(d), nn.Linear(d, VOCAB, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for b in self.blocks:
            x = b(x)
        return self.head(self.ln_f(x))


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1337)
    model = DDP(GPT())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    loader = DataLoader(TokenStream(), batch_size=8, num_workers=0)
    seen = 0
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        seen += int(x.sum())
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}")
    sums = [None, None]
    dist.all_gather_object(sums, seen)
    if rank == 0:
        print("checksum of tokens seen by each rank (should differ):", sums)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
