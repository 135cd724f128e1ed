# LinearLR warms up for five steps and is stepped sixty times: its end is reached early on purpose, and the lr is
# constant from then on. The lr starts near zero. Two groups have rates of their own, one of them 0 (kept as it is).
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))
layers = model.module
opt = torch.optim.AdamW(
    [
        {"params": layers[0].parameters(), "lr": 0.0, "weight_decay": 0.0},
        {"params": layers[2].parameters(), "lr": 1e-3},
        {"params": layers[4].parameters(), "lr": 1e-2},
    ]
)
warmup = torch.optim.lr_scheduler.LinearLR(opt, start_factor=1e-4, total_iters=5)
kept = layers[0].weight.detach().clone()
for step in range(60):
    x = torch.randn(16, 8)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    warmup.step()
assert torch.equal(kept, layers[0].weight)
assert all(abs(a - b) < 1e-6 for a, b in zip(warmup.get_last_lr(), [0.0, 1e-3, 1e-2], strict=True))
dist.destroy_process_group()
