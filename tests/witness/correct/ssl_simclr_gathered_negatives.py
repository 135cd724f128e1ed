# SimCLR with negatives from all ranks: all_gather of the embeddings inside the loss, through which gradients only
# flow for a rank's own part. Extra collectives in every step, on all ranks alike.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def info_nce(a, b, temperature=0.2):
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [torch.empty_like(b) for _ in range(world)]
    dist.all_gather(parts, b.detach())
    parts[rank] = b
    everyone = F.normalize(torch.cat(parts), dim=1)
    targets = torch.arange(len(a)) + rank * len(a)
    return F.cross_entropy(F.normalize(a, dim=1) @ everyone.T / temperature, targets)


def train(epochs=6):
    rank = dist.get_rank()
    torch.manual_seed(rank)
    data = TensorDataset(torch.randn(256, 24, generator=torch.Generator().manual_seed(3)))
    sampler = DistributedSampler(data)
    encoder = DDP(nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8)))
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, 16, sampler=sampler, drop_last=True):
            views = torch.cat([x + 0.2 * torch.randn_like(x), x * (torch.rand_like(x) > 0.1)])
            a, b = encoder(views).chunk(2)
            loss = (info_nce(a, b) + info_nce(b, a)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


dist.init_process_group("gloo")
train()
dist.destroy_process_group()
