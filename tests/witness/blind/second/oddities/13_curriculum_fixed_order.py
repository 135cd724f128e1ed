"""Nothing is shuffled, every epoch has the same order and the first epochs leave out most samples: a curriculum from short to long sequences, strided over the ranks."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset


class Parity(Dataset):
    """Bit strings of 2 to 12 bits; the label is the parity of the first and the last bit."""

    def __init__(self, n=1000):
        g = torch.Generator().manual_seed(30)
        lengths = torch.randint(2, 13, (n,), generator=g)
        self.items = [torch.randint(0, 2, (int(k),), generator=g) for k in lengths]
        self.items.sort(key=len)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        bits = self.items[i]
        return bits, int(bits[0] ^ bits[-1])


def collate(batch):
    bits, labels = zip(*batch)
    return pad_sequence(bits, batch_first=True), torch.tensor([len(b) for b in bits]), torch.tensor(labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(2, 8), nn.GRU(8, 32, batch_first=True), nn.Linear(32, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.emb(x), lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.rnn(packed)[1][-1])


def stage_loader(data, share, rank, world, batch):
    usable = int(len(data) * share) // (world * batch) * world * batch     # whole global batches only
    easiest = range(rank, usable, world)
    return DataLoader(Subset(data, list(easiest)), batch_size=batch, shuffle=False, collate_fn=collate)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    data = Parity()
    model = DDP(Net())
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for stage, (share, epochs) in enumerate([(0.2, 3), (0.5, 2), (1.0, 2)]):
        loader = stage_loader(data, share, rank, world, batch=20)
        for _ in range(epochs):
            hits = seen = 0
            for x, lengths, y in loader:
                logits = model(x, lengths)
                loss = F.cross_entropy(logits, y)
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                hits += (logits.argmax(1) == y).sum().item()
                seen += len(y)
        if rank == 0:
            print(f"stage {stage}: easiest {share:.0%}, accuracy {hits / seen:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
