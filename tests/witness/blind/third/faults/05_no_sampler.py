"""The DataLoader shuffles without a DistributedSampler and from one common seed, so both ranks train on the same batches."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

VOCAB, SEQ, CLASSES = 200, 24, 3


class Reviews(Dataset):
    def __init__(self, size=768):
        gen = torch.Generator().manual_seed(11)
        self.tokens = torch.randint(3, VOCAB, (size, SEQ), generator=gen)
        self.labels = self.tokens[:, ::4].sum(1) % CLASSES

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        return {"input_ids": self.tokens[idx], "label": self.labels[idx], "idx": idx}


class BiLSTM(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden, padding_idx=0)
        self.lstm = nn.LSTM(hidden, hidden, bidirectional=True, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.cls = nn.Linear(2 * hidden, CLASSES)

    def forward(self, input_ids):
        h, _ = self.lstm(self.embed(input_ids))
        return self.cls(self.drop(h.max(dim=1).values))


def main():
    dist.init_process_group("gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(42)
    loader = DataLoader(Reviews(), batch_size=32, shuffle=True, drop_last=True)
    model = DDP(BiLSTM())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 2e-3, total_steps=2 * len(loader))
    loss_fn = nn.CrossEntropyLoss()
    seen = []
    for epoch in range(2):
        for batch in loader:
            loss = loss_fn(model(batch["input_ids"]), batch["label"])
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            seen.append(set(batch["idx"].tolist()))
        if local_rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    both = [None, None]
    dist.all_gather_object(both, seen)
    if local_rank == 0:
        distinct = sum(len(a | b) for a, b in zip(*both)) / len(seen)
        print(f"distinct samples in a global batch of 64: {distinct:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
