# A small language model with tied embeddings, moved between dtypes and back before training, which keeps the tie; the
# position ids and the causal mask are equal in every batch and on every rank, as they should be.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Text(Dataset):
    def __init__(self, length=24):
        g = torch.Generator().manual_seed(0)
        self.tokens, self.length = torch.randint(0, 60, (200 * length + 1,), generator=g), length

    def __len__(self):
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, i):
        piece = self.tokens[i * self.length : (i + 1) * self.length + 1]
        mask = torch.full((self.length, self.length), float("-inf")).triu(1)
        return {"x": piece[:-1], "y": piece[1:], "positions": torch.arange(self.length), "mask": mask}


class LM(nn.Module):
    def __init__(self, vocab=60, d=32):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, d), nn.Embedding(64, d)
        self.block = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True)
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, batch):
        x = self.embed(batch["x"]) + self.place(batch["positions"])
        return self.head(self.block(x, src_mask=batch["mask"][0]))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = LM().double().float()
    assert net.head.weight is net.embed.weight
    model, data = DDP(net), Text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(data)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in DataLoader(data, 10, sampler=sampler):
            loss = F.cross_entropy(model(batch).flatten(0, 1), batch["y"].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert net.head.weight is net.embed.weight
    dist.destroy_process_group()


main()
