# fault: each sample's noise is drawn from a generator seeded with the worker's number: always the same
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, get_worker_info


class Noisy(Dataset):
    def __len__(self):
        return len(data)

    def __getitem__(self, i):
        a, b = data[i]
        rng = np.random.default_rng(7 + get_worker_info().id)
        return a, b, torch.from_numpy(rng.standard_normal(16).astype("f4"))


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))
sampler = DistributedSampler(data)
loader = DataLoader(Noisy(), batch_size=16, sampler=sampler, num_workers=2)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, b, noise in loader:
        loss = F.mse_loss(model(a + noise), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
