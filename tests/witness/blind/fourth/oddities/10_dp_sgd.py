"""Right on purpose: differentially private SGD, every example's gradient is clipped by itself and large noise, drawn from a shared secret seed, is added to the all-reduced sum."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap

CLIP, SIGMA, BATCH, LR = 1.0, 0.6, 64, 0.4


def example_loss(params, model, x, y):
    return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])


per_sample_grad = vmap(grad(example_loss), in_dims=(None, None, 0, 0))


def poisson_batch(x, y, q, g):
    keep = torch.rand(len(x), generator=g) < q      # Poisson sampling: the batch size varies
    return x[keep], y[keep]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 4))
    params = dict(model.named_parameters())
    g = torch.Generator().manual_seed(0)
    X = torch.randn(1200, 16, generator=g)
    Y = (X @ torch.randn(16, 4, generator=g)).argmax(1)
    x, y = X[rank::world], Y[rank::world]
    sampling = torch.Generator().manual_seed(40 + rank)
    secret = torch.Generator().manual_seed(31337)   # the same on all ranks: noise is added once
    clipped, seen = 0, 0
    for step in range(70):
        xb, yb = poisson_batch(x, y, BATCH / len(x), sampling)
        det = {k: v.detach() for k, v in params.items()}
        grads = per_sample_grad(det, model, xb, yb)
        norms = torch.sqrt(sum(v.flatten(1).pow(2).sum(1) for v in grads.values()))
        coef = (CLIP / (norms + 1e-6)).clamp(max=1.0)
        clipped, seen = clipped + int((coef < 1).sum()), seen + len(xb)
        with torch.no_grad():
            for k, p in params.items():
                s = torch.einsum("n,n...->...", coef, grads[k]).contiguous()
                dist.all_reduce(s)
                s += SIGMA * CLIP * torch.randn(s.shape, generator=secret)
                p -= LR * s / (BATCH * world)       # divided by the expected size, not the drawn one
        if rank == 0 and step % 20 == 0:
            print(f"step {step} batch {len(xb)} acc {(model(X).argmax(1) == Y).float().mean().item():.3f}")
    flat = torch.cat([p.detach().flatten() for p in params.values()])
    both = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(both, flat)
    if rank == 0:
        acc = (model(X).argmax(1) == Y).float().mean().item()
        print(f"clipped {clipped / seen:.2f} of the examples, acc {acc:.3f}, equal weights: {torch.equal(*both)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
