# A batch size ramp: the accumulation grows 1, 2, 4, 8 while the lr stays. Gradients are accumulated under no_sync and
# averaged with the window's last pass; a window is not scaled by a constant.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(5)
model = DDP(nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(16 * 8, 50)))
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
tokens = torch.Generator().manual_seed(rank)
for step in range(32):
    window = 2 ** (step // 8)
    for micro in range(window):
        model.require_backward_grad_sync = micro == window - 1  # nanoGPT's way to say no_sync
        x = torch.randint(0, 50, (4, 8), generator=tokens)
        loss = nn.functional.cross_entropy(model(x), x[:, 0]) / window
        loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
mine = torch.stack([p.detach().abs().sum() for p in model.parameters()])
theirs = mine.clone()
dist.broadcast(theirs, src=0)
assert torch.equal(mine, theirs)
dist.destroy_process_group()
