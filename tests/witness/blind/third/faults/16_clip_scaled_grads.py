"""Gradients are clipped without scaler.unscale_, so the clip acts on gradients 65536 times too large and nearly no update is left."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_model():
    return nn.Sequential(nn.Conv1d(2, 16, 5, padding=2), nn.ReLU(), nn.Conv1d(16, 16, 5, stride=2), nn.ReLU(),
                         nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(64, 4))


def make_data(n=640):
    g = torch.Generator().manual_seed(8)
    y = torch.randint(0, 4, (n,), generator=g)
    t = torch.linspace(0, 6.28, 40)
    x = torch.stack([torch.sin((y[:, None] + 1) * t), torch.cos((y[:, None] + 1) * t)], 1)
    return TensorDataset(x + 0.5 * torch.randn(x.shape, generator=g), y)


def train_one_epoch(model, loader, optimizer, scaler, criterion, max_norm):
    model.train()
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
    return total / len(loader)


def main(epochs=3, lr=0.1, max_norm=1.0):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = make_data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    model = DDP(make_model())
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(model, loader, optimizer, scaler, nn.CrossEntropyLoss(), max_norm)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss:.4f} scale {scaler.get_scale():.0f}")
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    moved = torch.stack([(p - b).norm() for p, b in zip(model.parameters(), before)]).norm().item()
    if dist.get_rank() == 0:
        print(f"norm of the gradient applied last: {norm:.1e} (at most {max_norm} was meant); all weights moved by {moved:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
