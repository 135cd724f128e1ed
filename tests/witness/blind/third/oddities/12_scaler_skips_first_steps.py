"""The GradScaler starts so high that the first updates are skipped on all ranks until the scale fits: that is its search; unscale_ comes before the clip."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Encoder(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.proj = nn.Linear(10, d)
        self.layer = nn.TransformerEncoderLayer(d, 4, 64, 0.1, batch_first=True)
        self.out = nn.Linear(d, 3)

    def forward(self, x):
        return self.out(self.layer(self.proj(x)).mean(1))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(600, 7, 10, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x.mean(1)[:, :3].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    model = DDP(Encoder())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 26, growth_interval=1000)
    skipped = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(xb) * 4, yb)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            skipped += scaler.get_scale() < before
        print(f"rank {dist.get_rank()} epoch {epoch} loss {loss.item():.4f} skipped so far {skipped}")
    print(f"rank {dist.get_rank()} weight norm {model.module.proj.weight.norm().item():.7f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
