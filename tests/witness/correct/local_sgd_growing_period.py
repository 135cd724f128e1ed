# Local SGD whose averaging period doubles (1, 2, 4, 8, ...) while DDP's own averaging is off by no_sync; momentum
# buffers are averaged too. A last average brings the ranks together again.
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=6)
parser.add_argument("--lr", type=float, default=0.02)
args = parser.parse_args()


def average(tensors):
    for t in tensors:
        dist.all_reduce(t)
        t.div_(dist.get_world_size())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3)))
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    mine = torch.Generator().manual_seed(50 + dist.get_rank())
    for r in range(args.rounds):
        for _ in range(2**r):
            x = torch.randn(8, 12, generator=mine)
            target = x[:, :3].argmax(1)
            with net.no_sync():
                loss = nn.functional.cross_entropy(net(x), target)
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
        with torch.no_grad():
            average(net.parameters())
            average(optimizer.state[p]["momentum_buffer"] for p in net.parameters())
    dist.destroy_process_group()


main()
