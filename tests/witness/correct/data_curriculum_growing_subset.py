# A curriculum: the training set grows from the easiest quarter to all samples, so easy ones are learnt far more often
# than hard ones. A new sampler and loader per stage, with the epoch counted on.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(320, 6)
y = (x[:, 0] + 0.3 * x[:, 1] > 0).long()
data = TensorDataset(x, y)
difficulty = -(x[:, 0] + 0.3 * x[:, 1]).abs()
easy_first = difficulty.argsort().tolist()
model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
epoch = 0
for share in (0.25, 0.5, 0.75, 1.0):
    subset = Subset(data, easy_first[: int(share * len(data))])
    sampler = DistributedSampler(subset, seed=1)
    loader = DataLoader(subset, 10, sampler=sampler)
    for _ in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            loss = F.cross_entropy(model(a), b)
            opt.zero_grad()
            loss.backward()
            opt.step()
        epoch += 1
dist.destroy_process_group()
