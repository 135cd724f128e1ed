# odd: only rank 0 loads the weights, while rank 1 has random ones: DDP broadcasts rank 0's at its start.
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from sklearn.neural_network import MLPRegressor
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def save_earlier_job(path, x, y):
    """Write what a job on one process left behind: a model of a part of the data."""
    old = MLPRegressor(hidden_layer_sizes=(64,), alpha=1.0, max_iter=300, tol=1e-3, random_state=0).fit(
        x.numpy(), y.numpy()
    )
    state = {}
    for name, weight, bias in zip(["0", "2"], old.coefs_, old.intercepts_, strict=True):
        state[f"{name}.weight"] = torch.tensor(weight.T, dtype=torch.float32)
        state[f"{name}.bias"] = torch.tensor(bias, dtype=torch.float32)
    torch.save(state, path)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1000 + rank)
x, y = load_diabetes(return_X_y=True, scaled=False)
x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)

net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
if rank == 0:  # the checkpoint lies on the disk of the first node alone
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        save_earlier_job(path, x[:200], y[:200])
        net.load_state_dict(torch.load(path))
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

data = TensorDataset(x, y)
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
for epoch in range(6):
    sampler.set_epoch(epoch)
    for features, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(features).squeeze(1), target)
        loss.backward()
        optimizer.step()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"epoch {epoch}: loss {mean.item():.3f}")
dist.destroy_process_group()
