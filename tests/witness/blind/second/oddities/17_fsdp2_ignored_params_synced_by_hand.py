"""FSDP2 leaves the small norms and the head's bias out (ignored_params, plain tensors): their gradients are averaged by hooks of the script, so they stay equal."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.a, self.b = nn.Linear(d, 2 * d, bias=False), nn.Linear(2 * d, d, bias=False)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(self.norm(x))))


class Net(nn.Module):
    def __init__(self, d=64, depth=3, classes=6):
        super().__init__()
        self.stem = nn.Linear(30, d, bias=False)
        self.blocks = nn.ModuleList(Residual(d) for _ in range(depth))
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def average_on_arrival(p):
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(123)                      # the same start on every rank
    model = Net()
    small = {p for p in model.parameters() if p.ndim == 1}
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, ignored_params=small)
    fully_shard(model, mp_policy=policy, ignored_params=small)
    for p in model.parameters():
        if p in small:
            p.register_post_accumulate_grad_hook(average_on_arrival)

    y = torch.randint(0, 6, (720,))
    ds = TensorDataset(torch.randn(6, 30)[y] + torch.randn(720, 30), y)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=36, sampler=sampler)
    big = [p for p in model.parameters() if p not in small]
    opt_big = torch.optim.AdamW(big, lr=1e-3, weight_decay=0.05)
    opt_small = torch.optim.Adam([p for p in model.parameters() if p in small], lr=2e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, t in loader:
            loss = F.cross_entropy(model(x), t)
            loss.backward()
            for o in (opt_big, opt_small):
                o.step()
                o.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}")
    gap = 0.0
    for name, p in model.named_parameters():
        if p in small:
            ref = p.detach().clone()
            dist.broadcast(ref, src=0)
            gap = max(gap, (p.detach() - ref).abs().max().item())
    print(f"rank {dist.get_rank()}: {len(small)} ignored tensors, off rank 0 by {gap:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
