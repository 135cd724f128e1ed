# A frozen teacher is sharded over the ranks by FSDP2 because it is large; each rank distills a student of its own from
# it, on its own shuffles of all samples. Nothing is averaged.
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)).requires_grad_(False)
fully_shard(teacher)
data = TensorDataset(torch.randn(320, 8))
torch.manual_seed(1 + dist.get_rank())
student = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
opt = torch.optim.Adam(student.parameters(), 1e-2)
for epoch in range(3):
    for (x,) in DataLoader(data, 16, shuffle=True):
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        loss = nn.functional.cross_entropy(student(x), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
