# ranks: 4
# Pipeline x data parallelism: the two ranks of a pipeline read the same samples, the two pipelines others.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
s = mesh["pp"].get_local_rank()
net = nn.Sequential(nn.Linear(16, 16), nn.ReLU()) if s == 0 else nn.Linear(16, 1)
pipe = ScheduleGPipe(PipelineStage(net, s, 2, torch.device("cpu"), group=mesh["pp"].get_group()), 4, loss_fn=F.mse_loss)
opt = torch.optim.SGD(net.parameters(), 0.05)
sampler = DistributedSampler(data, num_replicas=2, rank=mesh["dp"].get_local_rank())
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 16, sampler=sampler):
        opt.zero_grad()
        pipe.step(a) if s == 0 else pipe.step(target=b)
        for p in net.parameters():
            dist.all_reduce(p.grad, group=mesh["dp"].get_group())
            p.grad /= 2
        opt.step()
dist.destroy_process_group()
