# A GAN as a class, with lr four times higher for D, and an R1 penalty only in every fourth step (lazy), so that the
# steps differ in what they compute, on both ranks alike. D is switched off by requires_grad while G trains.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.g = DDP(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 2)))
        self.d = DDP(nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(), nn.Linear(24, 1)))
        self.opt_g = torch.optim.RMSprop(self.g.parameters(), lr=5e-4)
        self.opt_d = torch.optim.RMSprop(self.d.parameters(), lr=2e-3)

    def step_d(self, real, lazy):
        fake = self.g.module(torch.randn(len(real), 6)).detach()
        real.requires_grad_(lazy)
        out_real, out_fake = self.d(torch.cat([real, fake])).chunk(2)
        loss = F.softplus(-out_real).mean() + F.softplus(out_fake).mean()
        if lazy:
            grad = torch.autograd.grad(out_real.sum(), real, create_graph=True)[0]
            loss = loss + 4 * 0.1 * grad.square().sum(1).mean()
        self.opt_d.zero_grad(set_to_none=True)
        loss.backward()
        self.opt_d.step()
        return loss.item()

    def step_g(self, n):
        self.d.requires_grad_(False)
        loss = F.softplus(-self.d.module(self.g(torch.randn(n, 6)))).mean()
        self.opt_g.zero_grad(set_to_none=True)
        loss.backward()
        self.opt_g.step()
        self.d.requires_grad_(True)
        return loss.item()


def main():
    dist.init_process_group("gloo")
    trainer = Trainer(seed=dist.get_rank())
    for step in range(60):
        angle = torch.rand(32) * 6.283
        losses = trainer.step_d(torch.stack([angle.cos(), angle.sin()], 1), lazy=step % 4 == 0), trainer.step_g(32)
    print(losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
