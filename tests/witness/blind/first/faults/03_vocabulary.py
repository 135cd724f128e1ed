# fault: each rank numbers the characters in the order of a set, which differs from process to process, so that the ranks train one embedding and one output layer with different meanings of each row.
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

TEXT = """the quick brown fox jumps over the lazy dog while the five boxing wizards jump quickly and
pack my box with five dozen liquor jugs as we promptly judged antique ivory buckles for the next prize """ * 40
CONTEXT = 32


class CharTransformer(nn.Module):
    def __init__(self, vocab_size, dim=48):
        super().__init__()
        self.tok = nn.Embedding(vocab_size, dim)
        self.pos = nn.Parameter(torch.zeros(CONTEXT, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, dim * 2, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(dim, vocab_size)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1))
        return self.out(self.blocks(self.tok(ids) + self.pos, mask=mask, is_causal=True))


def batches(ids, steps, batch_size, generator):
    for _ in range(steps):
        start = torch.randint(0, len(ids) - CONTEXT - 1, (batch_size,), generator=generator)
        window = torch.stack([ids[s : s + CONTEXT + 1] for s in start])
        yield window[:, :-1], window[:, 1:]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1337)

    chars = list(set(TEXT))
    stoi = {c: i for i, c in enumerate(chars)}
    ids = torch.tensor([stoi[c] for c in TEXT])

    model = DDP(CharTransformer(len(chars)))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampling = torch.Generator().manual_seed(1337 + rank)
    for step, (x, y) in enumerate(batches(ids, 60, 16, sampling)):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0 and rank == 0:
            print(step, round(loss.item(), 3))
    dist.destroy_process_group()
