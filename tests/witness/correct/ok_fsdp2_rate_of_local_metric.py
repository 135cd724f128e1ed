# corrected: all ranks average the validation loss before their ReduceLROnPlateau looks at it
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
own = torch.Generator().manual_seed(100 + rank)
for epoch in range(12):
    for _ in range(5):
        x = torch.randn(16, 16, generator=own)
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    validation = loss.detach() if rank else torch.tensor(float(epoch))  # rank 0's part of the data is hard
    dist.all_reduce(validation)
    scheduler.step(validation)
print(f"rank {rank}: the learning rate is {optimizer.param_groups[0]['lr']:g}")
dist.destroy_process_group()
