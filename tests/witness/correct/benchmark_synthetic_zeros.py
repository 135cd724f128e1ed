# A throughput benchmark: the input is one constant tensor, made once and equal on every rank, because only the time of
# a step matters. It really trains, with warm-up steps that are not counted.
import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def parse():
    parser = argparse.ArgumentParser(description="images per second on synthetic data")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    return parser.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    images, labels = torch.ones(args.batch_size, 3, 16, 16), torch.zeros(args.batch_size, dtype=torch.long)
    model = DDP(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10)))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(args.warmup + args.steps):
        if step == args.warmup:
            dist.barrier()
            start = time.perf_counter()
        loss = nn.functional.cross_entropy(model(images), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
    rate = args.steps * args.batch_size * dist.get_world_size() / (time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(f"{rate:.0f} images/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
