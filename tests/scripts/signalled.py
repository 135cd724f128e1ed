"""Two gloo ranks that train until a signal comes, and what each of them does then. `folder` gets a file for each
moment, which holds its time."""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("roles", nargs=2)
parser.add_argument("--seconds", type=float, default=8)
args = parser.parse_args()
UPLOAD = "import time\nfor _ in range({}):\n    open('/dev/urandom', 'rb').read(100_000)\n    time.sleep(0.1)"


def mark(moment):
    (args.folder / f"{moment}-{rank}").write_text(str(time.time()))


def handle(number, _):
    """As handlers do that must not be interrupted; it waits for something else than the processor."""
    signal.signal(number, signal.SIG_IGN)
    mark("handling")
    time.sleep(args.seconds)
    mark("handled")
    sys.exit(0)


def train():
    weight = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(100_000):
        weight.square().sum().backward()
        dist.all_reduce(weight.grad)
        optimizer.step()
        time.sleep(0.02)
        if step == 5:
            mark("trains")
        if step == 10 and role == "stuck":
            dist.recv(torch.zeros(1), src=1 - rank)  # which waits for this rank: both are in C code
        if step == 10 and role == "pauses":
            time.sleep(600)  # the other rank waits in C code for this one, which does not


def save():
    until = time.monotonic() + args.seconds
    while time.monotonic() < until:
        torch.save(torch.zeros(10_000), args.folder / f"model-{rank}")
        time.sleep(0.2)


def upload():
    """In another process, and with little work of the processor."""
    subprocess.run([sys.executable, "-c", UPLOAD.format(round(10 * args.seconds))], start_new_session=True, check=True)


dist.init_process_group("gloo")
rank = dist.get_rank()
role = args.roles[rank]
if role == "handles":
    signal.signal(signal.SIGTERM, handle)
if role == "ignores":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
try:
    train()
except KeyboardInterrupt:
    mark("interrupted")
    if role in ("saves", "pauses", "uploads"):
        upload() if role == "uploads" else save()
        mark("saved")
    raise
