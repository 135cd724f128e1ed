# fault: the critic's optimizer was given the generator's parameters, so that the critic never moves
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 2))
sampler = DistributedSampler(data)
generator = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)))
critic = DDP(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1)))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
of_critic = torch.optim.Adam(generator.parameters(), lr=1e-3)
score = nn.functional.softplus
torch.manual_seed(dist.get_rank())
for epoch in range(3):
    sampler.set_epoch(epoch)
    for (real,) in DataLoader(data, batch_size=16, sampler=sampler):
        with torch.no_grad():
            fake = generator(torch.randn(16, 8))
        critic.zero_grad()
        both = critic(torch.cat([real, fake]))
        (score(-both[:16]) + score(both[16:])).mean().backward()
        of_critic.step()
        generator.zero_grad()
        score(-critic(generator(torch.randn(16, 8)))).mean().backward()
        of_generator.step()
dist.destroy_process_group()
