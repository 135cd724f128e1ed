"""Right on purpose: a sparse autoencoder whose dead features are overwritten every 25 steps with new directions, with their Adam moments zeroed and the decoder renormalised after each step."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class SAE(nn.Module):
    def __init__(self, d=24, m=96):
        super().__init__()
        w = F.normalize(torch.randn(m, d), dim=1)
        self.enc, self.dec = nn.Parameter(w.clone()), nn.Parameter(w.clone())
        self.b_enc, self.b_dec = nn.Parameter(torch.full((m,), -0.5)), nn.Parameter(torch.zeros(d))

    def forward(self, x):
        z = F.relu((x - self.b_dec) @ self.enc.t() + self.b_enc)
        return z @ self.dec + self.b_dec, z


@torch.no_grad()
def resample(sae, opt, fired, x, err):
    dead = (fired < fired.sum() * 2e-3).nonzero().squeeze(1)   # (almost) never fires
    if len(dead) == 0:
        return 0
    pick = torch.multinomial(err.pow(2), len(dead), replacement=True)
    new = F.normalize(x[pick] - sae.b_dec, dim=1)
    dist.broadcast(new, 0)                      # rank 0's badly explained inputs for all
    sae.enc[dead], sae.dec[dead], sae.b_enc[dead] = 0.2 * new, new, 0.0
    for p in (sae.enc, sae.dec, sae.b_enc):
        st = opt.state[p]
        st["exp_avg"][dead] = 0
        st["exp_avg_sq"][dead] = 0
    return len(dead)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(SAE())
    sae = model.module
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(0)
    atoms = F.normalize(torch.randn(64, 24, generator=g) * torch.linspace(2, 0.1, 24), dim=1)
    g.manual_seed(90 + rank)
    fired, revived = torch.zeros(96), []
    for step in range(100):
        code = (torch.rand(128, 64, generator=g) < 0.04) * torch.rand(128, 64, generator=g) * 2
        x = code @ atoms
        rec, z = model(x)
        err = (rec - x).pow(2).sum(1)
        loss = err.mean() + 0.05 * z.abs().sum(1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            sae.dec.copy_(F.normalize(sae.dec, dim=1))
        fired += (z.detach() > 0).float().sum(0)
        if step % 25 == 24 and step < 99:
            dist.all_reduce(fired)              # dead on all ranks, decided alike
            revived.append(resample(sae, opt, fired, x, err.detach()))
            fired.zero_()
        if rank == 0 and step % 20 == 19:
            print(f"step {step} mse {err.mean().item():.4f} l0 {(z > 0).float().sum(1).mean().item():.1f}")
    w = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(w) for _ in range(2)]
    dist.all_gather(both, w)
    if rank == 0:
        print(f"features overwritten on purpose: {revived}, equal weights: {torch.equal(*both)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
