# fault: the backbone is unfrozen after one epoch, but the optimizer was given only what required gradients before
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
sampler = DistributedSampler(data)
backbone, head = nn.Sequential(nn.Linear(16, 32), nn.ReLU()), nn.Linear(32, 4)
backbone.requires_grad_(False)
model = DDP(nn.Sequential(backbone, head))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
before = backbone[0].weight.clone()
for epoch in range(4):
    sampler.set_epoch(epoch)
    if epoch == 1:
        backbone.requires_grad_(True)
    for x, y in DataLoader(data, batch_size=16, sampler=sampler):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
if dist.get_rank() == 0:
    print("the backbone moved:", not torch.equal(backbone[0].weight, before))
dist.destroy_process_group()
