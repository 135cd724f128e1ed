# corrected: each worker seeds one generator with its own seed of this epoch and this rank
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, get_worker_info


class Noisy(Dataset):
    rng = None

    def __len__(self):
        return len(data)

    def __getitem__(self, i):
        a, b = data[i]
        if self.rng is None:
            self.rng = np.random.default_rng([get_worker_info().seed, dist.get_rank()])
        return a, b, torch.from_numpy(self.rng.standard_normal(16).astype("f4"))


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
