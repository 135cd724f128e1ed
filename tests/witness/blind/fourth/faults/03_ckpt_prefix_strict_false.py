"""The pretrained checkpoint was saved from the DDP wrapper ('module.' keys) and is loaded with strict=False into the bare model, so nothing is loaded."""
import os
import tempfile
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Encoder(nn.Module):
    def __init__(self, d_in=20, d=64, n_out=5):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(d_in, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU())
        self.head = nn.Linear(d, n_out)

    def forward(self, x):
        return self.head(self.encoder(x))


def batches(seed, n_out, steps, rank):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(20, n_out, generator=g)
    g.manual_seed(seed * 100 + rank)
    for _ in range(steps):
        x = torch.randn(32, 20, generator=g)
        yield x, (x @ w).argmax(1)


def pretrain(path, rank):
    torch.manual_seed(1)
    model = DDP(Encoder(n_out=5))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for x, y in batches(1, 5, 60, rank):
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print(f"pretrain loss {loss.item():.3f}")
        torch.save({"state_dict": model.state_dict(), "step": 60}, path)
    dist.barrier()


def finetune(path, rank):
    torch.manual_seed(2)
    model = Encoder(n_out=3)
    ckpt = torch.load(path, map_location="cpu")
    # the head has another number of classes downstream: drop it, load the rest
    state = {k: v for k, v in ckpt["state_dict"].items() if "head" not in k}
    model.load_state_dict(state, strict=False)
    w_loaded = model.encoder[0].weight.detach().clone()
    for p in model.encoder[0].parameters():
        p.requires_grad_(False)
    model = DDP(model)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for i, (x, y) in enumerate(batches(2, 3, 60, rank)):
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print(f"finetune loss {loss.item():.3f}")
        d = (w_loaded - ckpt["state_dict"]["module.encoder.0.weight"]).abs().max().item()
        print("difference of the 'loaded' encoder from the checkpoint (should be 0):", d)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, 0)
    path = os.path.join(box[0], "pretrained.pt")
    pretrain(path, dist.get_rank())
    finetune(path, dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()
