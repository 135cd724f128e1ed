"""Every epoch takes the same order and set_epoch is never called: a curriculum from short to long sequences, wanted so (shuffle=False)."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class ByLength(Dataset):
    """Sentences sorted by length, shortest first."""

    def __init__(self, n=480):
        g = torch.Generator().manual_seed(1)
        lengths = torch.randint(3, 30, (n,), generator=g).sort().values
        self.seqs = [torch.randint(1, 40, (int(l),), generator=g) for l in lengths]

    def __len__(self):
        return len(self.seqs)

    def __getitem__(self, i):
        s = self.seqs[i]
        return s, (s > 20).float().mean().round().long()


def collate(items):
    seqs, labels = zip(*items)
    return pad_sequence(seqs, batch_first=True), torch.tensor([len(s) for s in seqs]), torch.stack(labels)


class GRUClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(40, 20, padding_idx=0)
        self.gru = nn.GRU(20, 32, batch_first=True)
        self.fc = nn.Linear(32, 2)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.emb(ids), lengths, batch_first=True, enforce_sorted=False)
        return self.fc(self.gru(packed)[1][-1])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = ByLength()
    # curriculum: easy (short) first, in every epoch; the order must not change
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=16, sampler=sampler, collate_fn=collate)
    model = DDP(GRUClassifier())
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    for epoch in range(3):
        for ids, lengths, y in loader:
            loss = nn.functional.cross_entropy(model(ids, lengths), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} last lengths {lengths[:4].tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
