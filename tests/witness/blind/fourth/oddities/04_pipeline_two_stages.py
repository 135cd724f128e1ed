"""Right on purpose: hand-made pipeline parallelism, rank 0 holds the first half and rank 1 the second, so ranks have other weights, rank 0 has no loss and rank 1 gets no inputs."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

MICRO, B, D, CLASSES = 4, 8, 32, 6


def stage(rank):
    torch.manual_seed(17)
    layers = [nn.Linear(20, D), nn.ReLU(), nn.Linear(D, D), nn.ReLU(),
              nn.LayerNorm(D), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, CLASSES)]
    return nn.Sequential(*(layers[:4] if rank == 0 else layers[4:]))


def batch(g, w):
    x = torch.randn(MICRO, B, 20, generator=g)
    return x, (x @ w).argmax(-1)


def first_stage_step(model, xs):
    outs = []
    for m in range(MICRO):                       # fill
        h = model(xs[m])
        dist.send(h.detach().contiguous(), 1)
        outs.append(h)
    for h in outs:                               # drain
        grad = torch.empty_like(h)
        dist.recv(grad, 1)
        h.backward(grad)


def last_stage_step(model, ys):
    total, grads = 0.0, []
    for m in range(MICRO):
        h = torch.empty(B, D)
        dist.recv(h, 0)
        h.requires_grad_(True)
        loss = F.cross_entropy(model(h), ys[m]) / MICRO
        loss.backward()
        grads.append(h.grad)
        total += loss.item()
    for gr in grads:
        dist.send(gr.contiguous(), 0)
    return total


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = stage(rank)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(0)         # the same stream on both: inputs used by 0, labels by 1
    w = torch.randn(20, CLASSES, generator=g)
    losses = []
    for step in range(80):
        x, y = batch(g, w)
        opt.zero_grad()
        if rank == 0:
            first_stage_step(model, x)
        else:
            losses.append(last_stage_step(model, y))
        norm = sum(p.grad.pow(2).sum() for p in model.parameters())
        dist.all_reduce(norm)                    # clip by the norm of the whole pipeline
        coef = (1.0 / (norm.sqrt() + 1e-6)).clamp(max=1.0)
        for p in model.parameters():
            p.grad.mul_(coef)
        opt.step()
    if rank == 1:
        print(f"pipeline loss: first {losses[0]:.3f} last {sum(losses[-5:]) / 5:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
