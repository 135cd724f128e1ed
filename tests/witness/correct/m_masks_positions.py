# Masks and positions are equal in all batches of all ranks by design; the samples are not.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))


class D(torch.utils.data.Dataset):
    def __len__(s):
        return 256

    def __getitem__(s, i):
        return {"x": data.tensors[0][i], "mask": torch.ones(16), "pos": torch.arange(16.0), "y": data.tensors[1][i]}


sampler = DistributedSampler(D())
loader = DataLoader(D(), 16, sampler=sampler)
model = DDP(nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), 0.05)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for q in loader:
        loss = F.mse_loss(model(q["x"] * q["mask"] + 0 * q["pos"]), q["y"])
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
