# odd: the backbone does not change for two epochs and then does, with a new optimizer and a far smaller learning rate: a linear probe comes first, then all is fine-tuned.
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def run_phase(name, net, data, lr, epochs, first_epoch):
    model = DDP(net)  # wrapped anew, as DDP looks at requires_grad only once
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=lr)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(loader))
    for epoch in range(first_epoch, first_epoch + epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
        if dist.get_rank() == 0:
            print(f"{name} epoch {epoch}: {loss.item():.3f}")


dist.init_process_group("gloo")
torch.manual_seed(0)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
backbone = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU())
net = nn.Sequential(backbone, nn.Linear(64, 10))

backbone.requires_grad_(False)
run_phase("probe", net, data, lr=2e-2, epochs=2, first_epoch=0)
backbone.requires_grad_(True)
run_phase("tune", net, data, lr=5e-4, epochs=2, first_epoch=2)
dist.destroy_process_group()
