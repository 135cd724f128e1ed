"""The streaming dataset shards itself over DataLoader workers but not over ranks, so both ranks read exactly the same lines."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

CHARS = " abcdefghijklmnopqrstuvwxyz0123456789"
STOI = {c: i for i, c in enumerate(CHARS)}
LENGTH = 32


def read_lines(n=480):
    words = "the cat sat on a mat while two dogs ran over green hills to find some old bread".split()
    for i in range(n):
        picked = [words[(i * 7 + j * (i % 5 + 1)) % len(words)] for j in range(7)]
        yield i, " ".join([str(i)] + picked).ljust(LENGTH + 1)[: LENGTH + 1]


class LineStream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        wid, num = (info.id, info.num_workers) if info else (0, 1)
        for i, line in read_lines():
            if i % num == wid:
                yield i, torch.tensor([STOI[c] for c in line])


class CharLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(len(CHARS), 24)
        self.lstm = nn.LSTM(24, 64, num_layers=1, batch_first=True)
        self.fc = nn.Linear(64, len(CHARS))

    def forward(self, x):
        return self.fc(self.lstm(self.emb(x))[0])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    loader = DataLoader(LineStream(), batch_size=24, num_workers=2)
    model = DDP(CharLSTM())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    seen = []
    for epoch in range(2):
        for idx, ids in loader:
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, len(CHARS)), ids[:, 1:].reshape(-1))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            if epoch == 0:
                seen += idx.tolist()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.3f}")
    everyone = [None, None]
    dist.all_gather_object(everyone, seen)
    if dist.get_rank() == 0:
        both = set(everyone[0]) & set(everyone[1])
        print(f"lines read by both ranks in one epoch: {len(both)} of {len(set(everyone[0]) | set(everyone[1]))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
