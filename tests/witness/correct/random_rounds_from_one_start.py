# Rounds of pruning, each from the first weights, the first moments and the first seed: only the masks differ.
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.nn.utils.prune
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
start = {name: value.clone() for name, value in net.state_dict().items()}
fresh = optimizer.state_dict()
for epoch in range(5):
    net.load_state_dict(start)
    optimizer.load_state_dict(fresh)
    nn.utils.prune.l1_unstructured(net[0], "weight", 0.2)
    nn.utils.prune.remove(net[0], "weight")
    torch.manual_seed(7)
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
