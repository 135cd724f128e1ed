# Gradients are cleared in each way and at each place there is; one of them is the same in every step.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
own = torch.Generator().manual_seed(dist.get_rank())


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1, bias=False))
        self.offset = nn.Parameter(torch.zeros(1))  # its gradient is always 1

    def forward(self, x):
        for number in range(3):
            x = self[number](x)
        return x + self.offset


def by_hand(model, _):
    for p in model.parameters():
        p.grad = None


CLEARED = (
    lambda _, optimizer: optimizer.zero_grad(),
    lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda model, _: model.zero_grad(),
    lambda model, _: [p.grad.detach_().zero_() for p in model.parameters() if p.grad is not None],
    by_hand,
)
for number, clear in enumerate(CLEARED):
    for at_the_end in (True, False):
        torch.manual_seed(0)
        net = Net()
        model = DDP(net, gradient_as_bucket_view=number % 2 == 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(21):
            for window in range(2):
                x = torch.randn(8, 8, generator=own)
                loss = model(x).mean()
                if not at_the_end and not window:
                    clear(net, optimizer)
                loss.backward()
            optimizer.step()
            if at_the_end:
                clear(net, optimizer)
dist.destroy_process_group()
