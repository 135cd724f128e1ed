"""The loss is a sum over tokens times the world size over the global token count: DDP's mean then gives the exact mean over all tokens of both ranks."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Sentences(Dataset):
    def __init__(self, n=512):
        g = torch.Generator().manual_seed(2)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(4, 25, (), generator=g))
            start = int(torch.randint(1, 30, (), generator=g))
            self.items.append((start + 3 * torch.arange(length)) % 30 + 1)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class GRULM(nn.Module):
    def __init__(self, vocab=31, d=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.gru = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, vocab)

    def forward(self, ids):
        return self.out(self.gru(self.emb(ids))[0])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Sentences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler, collate_fn=lambda b: pad_sequence(b, batch_first=True))
    model = DDP(GRULM())
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for ids in loader:
            target = ids[:, 1:]
            tokens = (target != 0).sum()
            dist.all_reduce(tokens)
            logits = model(ids[:, :-1])
            loss_sum = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum")
            opt.zero_grad()
            (loss_sum * world / tokens).backward()
            opt.step()
        dist.all_reduce(loss_sum.detach())
        if rank == 0:
            print(f"epoch {epoch} token loss {(loss_sum / tokens).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
