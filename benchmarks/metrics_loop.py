"""Ranks that report twelve metrics of their own at each of ten steps a second: python benchmarks/browser_view.py"""

import logging
import math
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

NAMES = ("accuracy", "grad_norm", "entropy", "perplexity", "f1", "tokens", "weight_norm", "kl", "recall", "precision")
NAMES += ("auc", "margin")

metrics = logging.getLogger("metrics")
metrics.setLevel(logging.INFO)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(1, int(sys.argv[1]) + 1):
    (model(torch.randn(32, 16)) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    metrics.info({"step": step} | {name: rank + 2 + math.sin(step * i) for i, name in enumerate(NAMES)})
    time.sleep(0.1)
dist.destroy_process_group()
