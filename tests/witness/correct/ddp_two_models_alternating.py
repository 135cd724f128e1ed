# Two DDP models and optimizers that take turns (a teacher that adapts every fifth step, a student in all others), and a
# frozen copy of the first as a third. Their numbers of steps are different, on all ranks alike.
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def net(width):
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 3))


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
teacher, student = DDP(net(64)), DDP(net(8))
reference = copy.deepcopy(teacher.module).eval().requires_grad_(False)
opts = {"teacher": torch.optim.Adam(teacher.parameters(), 1e-3), "student": torch.optim.SGD(student.parameters(), 0.05)}
for step in range(60):
    x = torch.randn(24, 8)
    if step % 5 == 0:
        out = teacher(x)
        kl = F.kl_div(out.log_softmax(1), reference(x).log_softmax(1), log_target=True, reduction="batchmean")
        loss, opt = F.cross_entropy(out, x[:, :3].argmax(1)) + 0.1 * kl, opts["teacher"]
    else:
        with torch.no_grad():
            target = teacher(x).softmax(1)
        loss, opt = F.cross_entropy(student(x), target), opts["student"]
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
