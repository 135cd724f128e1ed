"""DistributedSampler.set_epoch is never called, so every epoch goes through the data in the same order and with the same batches."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class CharBlocks(Dataset):
    def __init__(self, block=32):
        text = ("the quick brown fox jumps over the lazy dog and runs away from it . " * 200)
        chars = sorted(set(text))
        self.vocab = len(chars)
        self.ids = torch.tensor([chars.index(c) for c in text])
        self.block = block

    def __len__(self):
        return (len(self.ids) - 1) // self.block

    def __getitem__(self, i):
        s = i * self.block
        return self.ids[s:s + self.block], self.ids[s + 1:s + self.block + 1], i


class MiniGPT(nn.Module):
    def __init__(self, vocab, block, d=32, heads=2, layers=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(block, d)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(d, heads, 4 * d, 0.0, batch_first=True, norm_first=True) for _ in range(layers))
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids):
        t = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(t)
        h = self.tok(ids) * 0.2 + self.pos(torch.arange(t))
        for b in self.blocks:
            h = b(h, src_mask=mask, is_causal=True)
        return self.head(self.ln(h))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=16)
    args = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    data = CharBlocks()
    loader = DataLoader(data, args.batch_size, sampler=DistributedSampler(data, shuffle=True), drop_last=True)
    model = DistributedDataParallel(MiniGPT(data.vocab, data.block))
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    orders = []
    for epoch in range(args.epochs):
        order = []
        for x, y, idx in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            ema.update_parameters(model.module)
            order += idx.tolist()
        orders.append(order)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} ppl {math.exp(loss.item()):.2f} first samples {order[:4]}")
    if dist.get_rank() == 0:
        print("epochs with the order of epoch 0:", sum(o == orders[0] for o in orders), "of", len(orders))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
