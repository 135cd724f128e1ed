"""DDP with a DataLoader, whose steps tests hold at a line, and profile. `steps`, then what shall happen."""

import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, steps, happens = dist.get_rank(), int(sys.argv[1]), sys.argv[2:]
torch.manual_seed(rank)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))


def train_step(x, y):
    out = model(x)
    scale = 1.0
    if rank == 0:
        scale = 1.0  # only rank 0 comes here
    loss = scale * nn.functional.mse_loss(out, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


step = 0
while step < steps:
    for x, y in torch.utils.data.DataLoader(data, batch_size=8, num_workers=int("workers" in happens)):
        if step == 10 and "calls_elsewhere" in happens:
            thread = threading.Thread(target=breakpoint)
            thread.start()
            thread.join()
            if not (child := os.fork()):
                try:
                    breakpoint()
                finally:
                    os._exit(7)
            print(f"child {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
        if step == 20 and "calls" in happens:
            breakpoint()
        if step == 20 and "calls_on_rank_0" in happens and rank == 0:
            breakpoint()
        loss = train_step(x, y)
        step += 1
        print(step, loss.hex(), flush=True)
        time.sleep(0.01)
monitoring = getattr(sys, "monitoring", None)
print("watched", sys.gettrace() is not None or (monitoring is not None and monitoring.get_tool(4) is not None))
dist.destroy_process_group()
