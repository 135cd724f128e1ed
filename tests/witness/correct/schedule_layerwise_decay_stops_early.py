# One lr per layer (layer-wise decay) under a OneCycleLR that is planned for 200 steps, of which the run uses 60: a
# budget of samples ends it early on purpose. Biases have no weight decay.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

PLANNED, BUDGET = 200, 60 * 2 * 16


def groups(net, lr, decay=0.7):
    layers = [m for m in net if isinstance(m, nn.Linear)]
    for depth, layer in enumerate(reversed(layers)):
        yield {"params": [layer.weight], "lr": lr * decay**depth, "weight_decay": 0.05}
        yield {"params": [layer.bias], "lr": lr * decay**depth, "weight_decay": 0.0}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    net = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(12, 12), nn.SiLU())], nn.Linear(12, 2))
    model = DDP(net)
    optimizer = torch.optim.AdamW(groups(net, 3e-3))
    rates = [g["lr"] for g in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=PLANNED, pct_start=0.1)
    stream = torch.Generator().manual_seed(1_000 + rank)
    seen = 0
    while seen < BUDGET:
        x = torch.randn(16, 12, generator=stream)
        loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        seen += 16 * world
    dist.destroy_process_group()


main()
