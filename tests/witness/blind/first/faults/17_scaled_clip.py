# fault: gradients are clipped while they still are scaled by the GradScaler (unscale_ is missing), so that a norm of 1 becomes 1/65536 after unscaling and the model hardly moves.
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse_data():
    d = load_digits()
    x = torch.from_numpy(d.images).float().unsqueeze(1).div(16)
    return TensorDataset(x, torch.from_numpy(d.target))


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 9, 10),
    )


def train_one_epoch(model, loader, optimizer, scaler, max_norm=1.0):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(x)
        loss = nn.functional.cross_entropy(output.float(), y)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = parse_data()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler, drop_last=True)
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(model, loader, optimizer, scaler)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f} scale {scaler.get_scale()}")
    dist.destroy_process_group()


main()
