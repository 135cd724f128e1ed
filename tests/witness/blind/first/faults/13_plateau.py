# fault: ReduceLROnPlateau is given each rank's own validation loss, so that the ranks lower their learning rates at different times and the replicas drift apart.
import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)

x, y = load_diabetes(return_X_y=True)
x = torch.tensor(x, dtype=torch.float32) * 20
y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32).unsqueeze(1)
train_set, val_set = TensorDataset(x[:340], y[:340]), TensorDataset(x[340:], y[340:])
train_sampler = DistributedSampler(train_set, shuffle=True)
train_loader = DataLoader(train_set, batch_size=32, sampler=train_sampler)
val_loader = DataLoader(val_set, batch_size=64, sampler=DistributedSampler(val_set, shuffle=False))

model = DDP(nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=0)


def evaluate():
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for features, target in val_loader:
            total += nn.functional.mse_loss(model(features), target, reduction="sum").item()
            count += len(target)
    return total / count


for epoch in range(12):
    train_sampler.set_epoch(epoch)
    model.train()
    for features, target in train_loader:
        loss = nn.functional.mse_loss(model(features), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    val_loss = evaluate()
    scheduler.step(val_loss)
    if rank == 0:
        print(f"epoch {epoch}: train {loss.item():.3f} val {val_loss:.3f} lr {optimizer.param_groups[0]['lr']:.1e}")

dist.destroy_process_group()
