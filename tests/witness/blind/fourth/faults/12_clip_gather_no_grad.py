"""CLIP-style loss gathers the text features with dist.all_gather, which carries no gradient, so the text tower never learns."""
import math
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class ImageTower(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(),
                                 nn.Flatten(), nn.Linear(16 * 9, d))

    def forward(self, x):
        return self.net(x)


class TextTower(nn.Module):
    def __init__(self, vocab=64, d=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.enc = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True)
        self.proj = nn.Linear(d, d)

    def forward(self, t):
        return self.proj(self.enc(self.emb(t)).mean(1))


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.text = ImageTower(), TextTower()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, img, txt):
        return F.normalize(self.visual(img), dim=-1), F.normalize(self.text(txt), dim=-1), self.logit_scale.exp()


def gather(x):
    out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x)
    return torch.cat(out)


def contrastive_loss(img, txt, scale, rank):
    # every image against the texts of all ranks: more negatives
    all_txt = gather(txt)
    logits = scale * img @ all_txt.t()
    labels = torch.arange(len(img)) + rank * len(img)
    return F.cross_entropy(logits, labels)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    # some text parameters were reported as unused by DDP, so:
    model = DDP(Clip(), find_unused_parameters=True)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    g = torch.Generator().manual_seed(77)
    protos = torch.randn(24, 3, 12, 12, generator=g)
    caps = torch.randint(0, 64, (24, 6), generator=g)
    g.manual_seed(rank)
    text0 = [p.detach().clone() for p in model.module.text.parameters()]
    for step in range(50):
        k = torch.randperm(24, generator=g)[:16]
        img = protos[k] + 0.3 * torch.randn(16, 3, 12, 12, generator=g)
        loss = contrastive_loss(*model(img, caps[k]), rank)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            model.module.logit_scale.clamp_(0, math.log(100))
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.3f} scale {model.module.logit_scale.exp().item():.2f}")

    moved = max((a - b).abs().max().item() for a, b in zip(model.module.text.parameters(), text0))
    if rank == 0:
        print("text tower moved by (should be > 0):", moved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
