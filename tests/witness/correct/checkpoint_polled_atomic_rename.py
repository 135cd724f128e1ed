# No collective orders the file: rank 0 writes to another name and renames it, which is atomic, and rank 1 waits until
# the name exists. Rank 1 is a separate evaluator without any training; rank 0 trains alone.
import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)
SAVES = 3
name = lambda i: os.path.join(folder[0], f"step-{i}.pt")  # noqa: E731
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
x = torch.randn(512, 3)
y = x.prod(1, keepdim=True)
if rank == 0:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for step in range(60):
        i = torch.randint(0, 400, (32,))
        loss = nn.functional.mse_loss(net(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            torch.save(net.state_dict(), name(step // 20) + ".tmp")
            os.replace(name(step // 20) + ".tmp", name(step // 20))
else:
    for i in range(SAVES):
        while not os.path.exists(name(i)):
            time.sleep(0.01)
        net.load_state_dict(torch.load(name(i), weights_only=True))
        with torch.no_grad():
            print(i, nn.functional.mse_loss(net(x[400:]), y[400:]).item())
dist.barrier()
if rank == 0:
    for i in range(SAVES):
        os.remove(name(i))
    os.rmdir(folder[0])
dist.destroy_process_group()
