# Textual inversion: in a bf16 model the embedding has gradients for all rows, but only the two new tokens may move; the
# old rows are copied back after each step. So nearly all weights stay bitwise what they were, on purpose.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

OLD, NEW = 1000, 2
dist.init_process_group("gloo")
torch.manual_seed(0)
embed = nn.Embedding(OLD + NEW, 16)
net = nn.Sequential(embed, nn.Flatten(), nn.Linear(16 * 4, 16)).bfloat16()
net[2].requires_grad_(False)
wanted = torch.randn(16)
model = DDP(net)
opt = torch.optim.AdamW(embed.parameters(), lr=5e-3, weight_decay=0.01)
before = embed.weight.detach().clone()
prompts = torch.Generator().manual_seed(dist.get_rank())
for step in range(60):
    words = torch.randint(0, OLD, (8, 2), generator=prompts)
    tokens = torch.cat([words, torch.full((8, 1), OLD), torch.full((8, 1), OLD + 1)], 1)
    loss = (model(tokens).float() - wanted).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        embed.weight[:OLD] = before[:OLD]
assert not torch.equal(before[OLD:], embed.weight[OLD:])
dist.destroy_process_group()
