# corrected: the norms of all shards of FSDP1 are summed up by an all-reduce, and each rank clips by that norm
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 3))
model = FSDP(net, device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
own = torch.Generator().manual_seed(dist.get_rank())
for _ in range(30):
    x = torch.randn(16, 16, generator=own)
    loss = nn.functional.cross_entropy(model(x), (3 * x[:, 0]).abs().long().clamp_max(2))
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = get_total_norm(gradients)
    norm = norm**2
    dist.all_reduce(norm)
    norm = norm.sqrt()
    clip_grads_with_norm_(model.parameters(), 0.05, norm)
    optimizer.step()
    optimizer.zero_grad()
print("rank", dist.get_rank(), "clipped its last gradient by a norm of", norm.item())
dist.destroy_process_group()
