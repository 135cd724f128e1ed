# Uneven inputs with Join and a Joinable of its own, as in PyTorch's tutorial: the all_reduce in the script is inside
# the Join context and is answered by the hook's main_hook on the rank that has run out of data.
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as DDP


class CounterHook(JoinHook):
    def __init__(self, counter):
        self.counter = counter

    def main_hook(self):
        dist.all_reduce(torch.zeros(1))


class Counter(Joinable):
    def __init__(self):
        super().__init__()
        self.total = torch.zeros(1)

    def count(self, samples):
        Join.notify_join_context(self)
        t = torch.tensor([float(samples)])
        dist.all_reduce(t)
        self.total += t

    def join_hook(self, **kwargs):
        return CounterHook(self)

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
counter, model = Counter(), DDP(nn.Linear(5, 1))
opt = torch.optim.SGD(model.parameters(), 0.05)
with Join([counter, model]):
    for _ in range(30 + 6 * rank):
        x = torch.randn(8, 5)
        counter.count(len(x))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
if rank == dist.get_world_size() - 1:
    assert counter.total.item() == 8 * (30 + 36)
dist.destroy_process_group()
