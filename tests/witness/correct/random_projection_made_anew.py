# A fixed random projection is not stored, but drawn with its seed in each step: nothing else is drawn.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


dist.init_process_group("gloo")
torch.manual_seed(7)
data = TensorDataset(torch.randn(192, 8), torch.randn(192, 1))
loader = DataLoader(data, 16, sampler=DistributedSampler(data))


def projected(x):
    torch.manual_seed(11)
    return x @ torch.randn(8, 4)


model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(5):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.mse_loss(model(projected(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
