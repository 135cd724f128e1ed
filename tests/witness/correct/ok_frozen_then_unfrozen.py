# corrected: the model is wrapped again after its backbone is unfrozen
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
net = torch.nn.Sequential()
net.backbone = torch.nn.Linear(16, 32)
net.head = torch.nn.Linear(32, 1)
for p in net.backbone.parameters():
    p.requires_grad = False
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(4):
    sampler.set_epoch(epoch)
    if epoch == 2:  # fine-tune the backbone too
        for p in net.backbone.parameters():
            p.requires_grad = True
        model = DDP(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
w = net.backbone.weight.detach()
both = [torch.zeros_like(w) for _ in range(2)]
dist.all_gather(both, w)
print("rank", rank, "backbones differ by", (both[0] - both[1]).abs().max().item())
dist.destroy_process_group()
