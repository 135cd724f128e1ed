# odd: two backward passes per step, and weights moved by hand in between: sharpness-aware minimisation.
import torch
import torch.distributed as dist
from sklearn.datasets import load_wine
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RHO = 0.05


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x, y = load_wine(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    data = TensorDataset(x, torch.tensor(y))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(13, 32), nn.Tanh(), nn.Linear(32, 3)))
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for features, target in loader:
            nn.functional.cross_entropy(model(features), target).backward()
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in params]).norm()
                shifts = [p.grad * (RHO / (norm + 1e-12)) for p in params]
                for p, shift in zip(params, shifts, strict=True):
                    p.add_(shift)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features), target)
            loss.backward()
            with torch.no_grad():
                for p, shift in zip(params, shifts, strict=True):
                    p.sub_(shift)
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.3f}")
    dist.destroy_process_group()


main()
