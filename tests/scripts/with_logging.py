"""A classifier that logs what it measures with the standard library, and knows nothing of labkit."""

import logging
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

metrics = logging.getLogger("metrics")
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank:
    metrics.setLevel(logging.ERROR)  # only rank 0 prints; labkit keeps what every rank logs
torch.manual_seed(rank)
model = DistributedDataParallel(nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

metrics.info({"classes": 2})
for step in range(1, int(sys.argv[1]) + 1):
    x = torch.randn(32, 16)
    y = (x.sum(1) > 0).long()
    logits = model(x)
    nn.functional.cross_entropy(logits, y).backward()
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    predicted = logits.argmax(1)
    f1 = 2 * (predicted & y).sum() / (predicted.sum() + y.sum())
    metrics.info("step %(step)d f1 %(f1).3f", {"step": step, "f1": f1, "grad_norm": grad_norm})
metrics.info("validation f1 %(validation_f1).3f", {"validation_f1": f1})
dist.destroy_process_group()
