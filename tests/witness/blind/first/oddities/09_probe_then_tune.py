# odd: the backbone does not change for two epochs and then does, at a far smaller learning rate: probe, then tune.
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def pretrained_backbone(x, dim=32):
    """A layer that was fitted without labels: the whitened principal components of the images."""
    pca = PCA(dim, whiten=True, svd_solver="full").fit(x)
    layer = nn.Linear(x.shape[1], dim)
    weight = torch.tensor(pca.components_ / pca.explained_variance_[:, None] ** 0.5, dtype=torch.float32)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(-weight @ torch.tensor(pca.mean_, dtype=torch.float32))
    return nn.Sequential(layer, nn.Tanh())


def run_phase(name, net, data, lr, epochs, first_epoch):
    model = DDP(net)  # wrapped anew, as DDP looks at requires_grad only once
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=lr)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler, drop_last=True)
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
backbone = pretrained_backbone(digits.data / 16)
net = nn.Sequential(backbone, nn.Linear(32, 10))

backbone.requires_grad_(False)
run_phase("probe", net, data, lr=5e-2, epochs=2, first_epoch=0)
backbone.requires_grad_(True)
run_phase("tune", net, data, lr=1e-3, epochs=2, first_epoch=2)
dist.destroy_process_group()
