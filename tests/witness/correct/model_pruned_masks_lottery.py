# Iterative magnitude pruning: pruned weights are zero and stay zero (masks by torch's prune), the rest is rewound to
# its start after each round, so the weights go back to where they were. A new DDP and optimizer per round.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import prune
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(256, 20)
data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
layers = [net[0], net[2]]
for layer in layers:
    prune.identity(layer, "weight")
start = {n: p.detach().clone() for n, p in net.named_parameters()}
sampler = DistributedSampler(data)
epoch = 0
for _round in range(3):
    model = DDP(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        sampler.set_epoch(epoch)
        epoch += 1
        for a, b in DataLoader(data, 16, sampler=sampler):
            opt.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            opt.step()
    prune.global_unstructured([(m, "weight") for m in layers], prune.L1Unstructured, amount=0.4)
    with torch.no_grad():
        for n, p in net.named_parameters():
            p.copy_(start[n])
masks = torch.cat([m.weight_mask.flatten() for m in layers])
first = masks.clone()
dist.broadcast(first, 0)
assert torch.equal(masks, first)
dist.destroy_process_group()
