"""Each rank trains a different model with its own seed and no gradient ever crosses: a deep ensemble, one member per rank, whose votes are averaged at the end."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def make_data():
    g = torch.Generator().manual_seed(0)
    x = torch.rand(560, 1, generator=g) * 8 - 4
    y = torch.sin(x) * x + 0.3 * torch.randn(560, 1, generator=g)
    return TensorDataset(x[:480], y[:480]), (x[480:], y[480:])


class Member(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.mean, self.logvar = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, x):
        h = self.body(x)
        return self.mean(h), self.logvar(h)


def main():
    dist.init_process_group("gloo")
    member, members = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31337 + member)
    train_set, (test_x, test_y) = make_data()
    net = Member(width=64)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    loader = DataLoader(train_set, batch_size=32, shuffle=True)      # all data, each member in its own order
    for epoch in range(8):
        for x, y in loader:
            mu, logvar = net(x)
            loss = F.gaussian_nll_loss(mu, y, logvar.exp().clamp(min=1e-3))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    net.eval()
    with torch.no_grad():
        mu, logvar = net(test_x)
    mine = ((mu - test_y) ** 2).mean()
    votes = [torch.empty_like(mu) for _ in range(members)]
    dist.all_gather(votes, mu)
    together = ((torch.stack(votes).mean(0) - test_y) ** 2).mean()
    print(f"member {member}: mse {mine:.3f}; ensemble of {members}: {together:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
