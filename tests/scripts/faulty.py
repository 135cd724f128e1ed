"""Two or more gloo ranks that all-reduce once a step; one of them misbehaves at a given step."""

import argparse
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="none")
parser.add_argument("--rank", type=int, default=1)
parser.add_argument("--at", type=int, default=5)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--sleep", type=float, default=0.05)
parser.add_argument("--timeout", type=float, default=120)
args = parser.parse_args()


def misbehave():
    if args.fault == "raise":
        raise ValueError("boom <script>alert(1)</script>")
    if args.fault == "exit":
        sys.exit(3)
    if args.fault == "message":
        sys.exit("the data folder is empty")
    if args.fault == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if args.fault == "sigsegv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if args.fault == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.fault == "hang":
        time.sleep(600)
    if args.fault == "grandchild":
        subprocess.Popen(["sleep", "600"], start_new_session=True)


def main():
    if args.fault == "deaf":
        misbehave()
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    rank = dist.get_rank()
    weight = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(1, args.steps + 1):
        if rank == args.rank and step == args.at and args.fault != "deaf":
            if args.fault == "return":
                return
            misbehave()
        loss = ((weight - 1) ** 2).sum()
        loss.backward()
        try:
            dist.all_reduce(weight.grad)
        except RuntimeError as error:
            if args.fault == "sigkill":  # as frameworks do
                raise RuntimeError("training failed") from error
            raise
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(args.sleep)
    dist.destroy_process_group()


main()
