"""Two or more gloo ranks that all-reduce once a step; one of them misbehaves at a given step."""

import argparse
import os
import re
import resource
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="none")
parser.add_argument("--rank", type=int, default=1)
parser.add_argument("--at", type=int, default=5)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--sleep", type=float, default=0.05)
parser.add_argument("--timeout", type=float, default=120)
parser.add_argument("--workers", type=int, default=0, help="persistent DataLoader workers on every rank")
parser.add_argument("--cgroup", type=Path, help="a memory cgroup, for the fault oom")
parser.add_argument("--lines", type=int, default=0, help="printed at every step")
args = parser.parse_args()


def misbehave():
    if args.fault == "raise":
        raise ValueError("boom <script>alert(1)</script>")
    if args.fault == "exit":
        sys.exit(3)
    if args.fault == "zero":
        sys.exit(0)
    if args.fault == "vanish":
        os._exit(0)
    if args.fault == "message":
        sys.exit("the data folder is empty")
    if args.fault in ("sigkill", "sigsegv", "sigabrt", "sigstop"):
        os.kill(os.getpid(), getattr(signal, args.fault.upper()))
    if args.fault == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.fault in ("hang", "deadlock"):
        time.sleep(600)
    if args.fault == "spin":
        while True:
            pass
    if args.fault == "gil":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if args.fault == "slow":
        time.sleep(3 * args.sleep)
    if args.fault == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        # by another process: a script that looks into its own /proc does not run as a fork
        pages = subprocess.check_output(["sh", "-c", "cat /proc/$PPID/statm"]).split()[0]
        held = int(pages) * os.sysconf("SC_PAGESIZE")
        resource.setrlimit(resource.RLIMIT_AS, (held + (256 << 20), resource.RLIM_INFINITY))
        torch.ones(1 << 30)
    if args.fault == "oom":
        (args.cgroup / "cgroup.procs").write_text(str(os.getpid()))
        torch.ones(1 << 30)
    if args.fault in ("grandchild", "daemon"):
        leave_behind()
    if args.fault == "long":
        raise ValueError("boom\n" + "x" * 5_000_000)
    if args.fault == "mute":
        raise type("Mute", (Exception,), {"__str__": lambda self: 1 / 0})()
    if args.fault == "quit":
        os._exit(3)


def reduce(tensor, misfit):
    """The collective of every step, or one that the other ranks do not expect."""
    if misfit and args.fault == "collective":
        dist.broadcast(tensor, src=args.rank)
    elif misfit and args.fault == "shape":
        dist.all_reduce(torch.zeros(1000))
    elif misfit and args.fault == "dtype":
        dist.all_reduce(tensor.double())
    elif misfit and args.fault == "count":  # one call too many; the ranks are out of step from here on
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    else:
        dist.all_reduce(tensor)


def main():
    if args.fault == "deaf":
        misbehave()
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    rank = dist.get_rank()
    weight = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    data = TensorDataset(torch.ones(args.steps, 8))
    loader = DataLoader(data, num_workers=args.workers, persistent_workers=args.workers > 0)
    for step, (x,) in enumerate(loader, 1):
        everyone = args.fault in ("both", "deadlock")
        its_turn = (rank == args.rank or everyone) and (step == args.at or (args.fault == "slow" and step > args.at))
        if its_turn and args.fault == "both":
            raise (ValueError("the first") if rank == args.rank else KeyError("the second"))
        if its_turn and args.fault == "return":
            return
        if its_turn and args.fault != "deaf":
            misbehave()
        for line in range(args.lines):
            print(f"rank {rank} step {step} line {line}")
        loss = ((weight - x) ** 2).sum()
        loss.backward()
        try:
            reduce(weight.grad, misfit=its_turn)
        except RuntimeError as error:
            if args.fault == "sigkill":  # as frameworks do
                raise RuntimeError("training failed") from error
            raise
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(args.sleep)
    dist.destroy_process_group()


def leave_behind():
    """A child in a session of its own; the daemon's parent is gone, its environment empty, SIGTERM ignored."""
    if args.fault == "grandchild":
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    elif os.fork() == 0:
        run = os.environ.get("LABKIT_RUN") or os.environ.get("FAULT_TABLE")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([f"daemon-{run}", "600"], executable="/bin/sleep", env={}, start_new_session=True)
        os._exit(0)


main()
