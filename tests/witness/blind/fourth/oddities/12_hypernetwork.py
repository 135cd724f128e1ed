"""Right on purpose: a hypernetwork writes the weights of a target network (functional_call), so the target network's own parameters stay at their initial values and never enter an optimizer."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as DDP


class HyperNet(nn.Module):
    def __init__(self, target, n_tasks, d=16):
        super().__init__()
        self.shapes = {k: v.shape for k, v in target.named_parameters()}
        self.task = nn.Embedding(n_tasks, d)
        self.trunk = nn.Sequential(nn.Linear(d, 48), nn.SiLU())
        self.heads = nn.ModuleDict({k.replace(".", "_"): nn.Linear(48, v.numel()) for k, v in target.named_parameters()})
        for k, v in target.named_parameters():    # start from the target's init
            h = self.heads[k.replace(".", "_")]
            nn.init.normal_(h.weight, std=0.02)
            h.bias.data.copy_(v.detach().flatten())

    def forward(self, task_id):
        h = self.trunk(self.task(task_id))
        return {k: self.heads[k.replace(".", "_")](h).view(s) for k, s in self.shapes.items()}


def tasks(n):
    g = torch.Generator().manual_seed(0)
    return torch.rand(n, generator=g) * 2 + 0.5, torch.rand(n, generator=g) * 3


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    target = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))
    target.requires_grad_(False)
    target0 = [p.clone() for p in target.parameters()]
    hyper = DDP(HyperNet(target, 8))
    opt = torch.optim.Adam(hyper.parameters(), lr=2e-3)
    amp, phase = tasks(8)
    g = torch.Generator().manual_seed(60 + rank)
    hist = []
    for step in range(120):
        t = torch.randint(0, 8, (), generator=g)     # each rank another task
        x = torch.rand(48, 1, generator=g) * 4 - 2
        y = amp[t] * torch.sin(x + phase[t])
        weights = hyper(t)
        loss = F.mse_loss(functional_call(target, weights, (x,)), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        hist.append(loss.item())
        if rank == 0 and step % 40 == 0:
            print(f"step {step} task {t.item()} loss {loss.item():.4f}")
    same = all(torch.equal(a, b) for a, b in zip(target.parameters(), target0))
    if rank == 0:
        print(f"loss {sum(hist[:10]) / 10:.3f} -> {sum(hist[-10:]) / 10:.3f}, target's own weights untouched (meant): {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
