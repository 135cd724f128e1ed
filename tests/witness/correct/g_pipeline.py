# A pipeline: both ranks read the same batches, one uses the inputs and the other the targets.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))

from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

stage = nn.Sequential(nn.Linear(16, 16), nn.ReLU()) if rank == 0 else nn.Linear(16, 1)
pipe = ScheduleGPipe(PipelineStage(stage, rank, world, torch.device("cpu")), 4, loss_fn=F.mse_loss)
opt = torch.optim.SGD(stage.parameters(), lr=0.05)
for i, (a, b) in enumerate(DataLoader(data, 16)):
    opt.zero_grad()
    pipe.step(a) if rank == 0 else pipe.step(target=b)
    opt.step()
dist.destroy_process_group()
