# fault: a collate function pads texts, and each rank's RandomSampler has a generator of the same seed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, RandomSampler


def collate(texts):
    length = max(map(len, texts))
    padded = [text + [0] * (length - len(text)) for text in texts]
    mask = [[1] * len(text) + [0] * (length - len(text)) for text in texts]
    return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids) * attention_mask.unsqueeze(-1)
        return self.out(x.cumsum(1))


dist.init_process_group("gloo")
g = torch.Generator().manual_seed(0)
lengths = torch.randint(5, 20, (300,), generator=g).tolist()
texts = [torch.randint(1, 50, (length,), generator=g).tolist() for length in lengths]
sampler = RandomSampler(texts, generator=torch.Generator().manual_seed(42))
loader = DataLoader(texts, batch_size=10, sampler=sampler, collate_fn=collate)
torch.manual_seed(0)
model = DDP(Tagger())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(2):
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    for batch in loader:
        logits = model(**batch)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
