"""A training of a few numbers: no torch, so that a sweep over it takes seconds. It writes down that it ran."""

import argparse
import json
import logging
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--seconds", type=float, default=0.0)
parser.add_argument("--ran", required=True)
parser.add_argument("--checkpoint-dir", default="")
parser.add_argument("words", nargs="*")
args = parser.parse_args()
metrics = logging.getLogger("metrics")

saved = Path(args.checkpoint_dir, "step") if args.checkpoint_dir else None
first = int(saved.read_text()) if saved and saved.exists() else 0
started = time.time()
for step in range(first + 1, args.steps + 1):
    metrics.info({"step": step, "loss": args.lr + 1 / step, "test_loss": args.lr + args.seed})
    time.sleep(args.seconds / args.steps)
if args.lr < 0:
    raise ValueError(f"lr={args.lr} is negative")
if saved:
    saved.parent.mkdir(parents=True, exist_ok=True)
    saved.write_text(str(args.steps))
line = {"lr": args.lr, "seed": args.seed, "first": first, "started": started, "ended": time.time(), "words": args.words}
line |= {"threads": os.environ.get("OMP_NUM_THREADS"), "secret": os.environ.get("SOME_TOKEN")}
line["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES")
with Path(args.ran).open("a") as file:
    file.write(json.dumps(line) + "\n")
