# Lookahead as an optimizer around another: every fifth step the fast weights jump back toward the slow ones. All of
# it is a function of averaged gradients, so the replicas stay equal without another collective.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner, k=5, alpha=0.5):
        self.inner, self.k, self.alpha, self.count = inner, k, alpha, 0
        super().__init__(inner.param_groups, {})
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    s.lerp_(p, self.alpha)
                    p.copy_(s)
        return loss


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 1)))
    optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=5e-3))
    for _ in range(60):
        x = torch.randn(32, 6)
        loss = (model(x) - x.max(1, keepdim=True).values).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
