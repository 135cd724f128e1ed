# The options say what to load: without --pretrained the state is an empty dict and strict=False loads nothing, on
# purpose; and a second file has only BatchNorm's running statistics, no weights. Training starts from scratch.
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--pretrained", default=None)
parser.add_argument("--steps", type=int, default=50)
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
state = torch.load(args.pretrained, weights_only=True) if args.pretrained else {}
net.load_state_dict(state, strict=False)
statistics = {"1.running_mean": torch.zeros(16), "1.running_var": torch.full((16,), 0.5)}
net.load_state_dict(statistics, strict=False)
model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(net) if torch.cuda.is_available() else net)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(args.steps):
    x = torch.randn(16, 6)
    loss = (model(x) - x.std(1, keepdim=True)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
