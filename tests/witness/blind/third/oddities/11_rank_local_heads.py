"""The head's weights differ between ranks for good and DDP is told to ignore them: each rank is a hospital with its own head on a common encoder (FedPer)."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


class SiteModel(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(18, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU())
        self.head = nn.Linear(24, classes)

    def forward(self, x):
        return self.head(self.encoder(x))


def site_data(site, n=480):
    g = torch.Generator().manual_seed(500 + site)
    x = torch.randn(n, 18, generator=g) + 0.2 * site
    y = x[:, site * 3:site * 3 + 3].argmax(1)  # each site has its own labels
    return TensorDataset(x, y)


def main():
    dist.init_process_group("gloo")
    site = dist.get_rank()
    torch.manual_seed(40 + site)
    model = SiteModel(classes=3)
    local = [n for n, _ in model.named_parameters() if n.startswith("head.")]
    DDP._set_params_and_buffers_to_ignore_for_model(model, local)
    ddp = DDP(model)
    loader = DataLoader(site_data(site), batch_size=24, shuffle=True)
    opt = torch.optim.Adam([{"params": model.encoder.parameters(), "lr": 2e-3}, {"params": model.head.parameters(), "lr": 5e-3}])
    for epoch in range(3):
        for x, y in loader:
            loss = nn.functional.cross_entropy(ddp(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"site {site} epoch {epoch} loss {loss.item():.3f}")
    enc = sum(p.double().sum().item() for p in model.encoder.parameters())
    print(f"site {site}: encoder sum {enc:.6f}, head norm {model.head.weight.norm().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
