# An ensemble with a checkpoint of its own per rank: each writes and reads only its file, keeps the last two, and starts
# again from the one before the last when its loss has become worse, at another time than the other rank.
import tempfile
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
x, y = torch.randn(256, 5), torch.randn(256, 1)
with tempfile.TemporaryDirectory(prefix=f"rank{rank}-") as folder:
    net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05 * (1 + 3 * rank), momentum=0.9)
    saved, best = deque(maxlen=2), float("inf")
    for step in range(80):
        i = torch.randperm(256)[:32]
        loss = (net(x[i]) - y[i]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 9:
            if loss > 2 * best and saved:
                state = torch.load(saved[0], weights_only=True)
                net.load_state_dict(state["net"])
                opt.load_state_dict(state["opt"])
            best = min(best, loss.item())
            path = Path(folder, f"{step:03d}.pt")
            torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, path)
            if len(saved) == 2:
                saved[0].unlink()
            saved.append(path)
dist.barrier()
dist.destroy_process_group()
