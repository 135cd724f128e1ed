# Fine-tuning on five pictures: the data set is repeated a hundred times, so all ranks learn the same samples again and
# again. Noise and times are different on each rank, and prior-preservation samples are drawn by rank.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
pictures = TensorDataset(torch.rand(5, 24, generator=torch.Generator().manual_seed(0)))
prior = TensorDataset(torch.rand(200, 24, generator=torch.Generator().manual_seed(1)))
torch.manual_seed(rank)
model = DDP(nn.Sequential(nn.Linear(25, 48), nn.SiLU(), nn.Linear(48, 24)))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)


def denoise(x):
    t, noise = torch.rand(len(x), 1), torch.randn_like(x)
    return (model(torch.cat([(1 - t) * x + t * noise, t], 1)) - (noise - x)).square().mean()


subject = DataLoader(ConcatDataset([pictures] * 100), 5, sampler=DistributedSampler(range(500), seed=4))
others = iter(DataLoader(prior, 2, sampler=DistributedSampler(prior, seed=4)))
for (x,) in subject:
    opt.zero_grad()
    (old,) = next(others)
    (denoise(torch.cat([x, old]))).backward()
    opt.step()
dist.destroy_process_group()
