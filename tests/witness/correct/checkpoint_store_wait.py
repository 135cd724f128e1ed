# Rank 0 prepares a file (pretrained weights) and announces it in the TCPStore; rank 1 waits for the key and then loads
# it. No collective of the process group is between the writing and the reading.
import os
import pathlib
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()


def backbone():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU())


if rank == 0:
    path = pathlib.Path(tempfile.mkdtemp(), "pretrained.pt")
    torch.manual_seed(123)
    torch.save(backbone().state_dict(), path)
    store.set("pretrained", str(path))
store.wait(["pretrained"])
path = pathlib.Path(store.get("pretrained").decode())
body = backbone()
body.load_state_dict(torch.load(path, weights_only=True))

torch.manual_seed(rank)
model = DDP(nn.Sequential(body, nn.Linear(12, 3)))
optimizer = torch.optim.AdamW(
    [{"params": body.parameters(), "lr": 1e-4}, {"params": model.module[1].parameters()}], 1e-2
)
for step in range(40):
    x = torch.randn(16, 6)
    loss = nn.functional.cross_entropy(model(x), x.view(16, 3, 2).sum(2).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if rank == 0:
    os.remove(path)
    path.parent.rmdir()
dist.destroy_process_group()
