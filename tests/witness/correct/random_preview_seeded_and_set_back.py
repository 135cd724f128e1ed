# Samples for a preview are drawn with the same seed in each epoch, in a fork of the generator or with its state set back.
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
net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(5):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        preview = torch.randn(4, 8)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(preview, torch.randn(4, 8))
    torch.set_rng_state(state)
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
