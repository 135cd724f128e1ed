# A transformers model in a hand-written loop: the tied lm_head, a scheduler of transformers stepped once per optimizer
# step, padding masks, accumulation of two, and perplexity on a split without padding. Dropout is seeded by rank.
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(0)
ids = torch.randint(1, 64, (221, 16), generator=g)
mask = (torch.arange(16) < torch.randint(6, 17, (221, 1), generator=g)).long()
data = TensorDataset(ids * mask, mask)
train, val = Subset(data, range(192)), Subset(data, range(192 + rank, 221, world))
torch.manual_seed(rank)
config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
model = DDP(GPT2LMHeadModel(config))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = DistributedSampler(train)
loader = DataLoader(train, 8, sampler=sampler)  # 12 batches, 6 steps
scheduler = get_cosine_schedule_with_warmup(opt, 3, 5 * len(loader) // 2)


def loss_of(net, x, m):
    return net(input_ids=x, attention_mask=m, labels=x.masked_fill(m == 0, -100)).loss


for epoch in range(5):
    sampler.set_epoch(epoch)
    model.train()
    for i, (x, m) in enumerate(loader, 1):
        (loss_of(model, x, m) / 2).backward()
        if i % 2 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            scheduler.step()
            opt.zero_grad()
    model.eval()
    totals = torch.zeros(2)
    with torch.no_grad():
        for x, m in DataLoader(val, 8):
            tokens = m[:, 1:].sum()
            totals += torch.stack([loss_of(model.module, x, m) * tokens, tokens.float()])
    dist.all_reduce(totals)
    if rank == 0:
        print(epoch, (totals[0] / totals[1]).exp().item())
dist.destroy_process_group()
