"""Only rank 0 loads the pretrained weights and FSDP2 (unlike DDP) broadcasts nothing, so the shards held by rank 1 stay at their random values."""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CKPT = os.path.join(tempfile.gettempdir(), f"base_{os.environ.get('TORCHELASTIC_RUN_ID', 'x')}.pt")


def build():
    return nn.Sequential(
        nn.Linear(32, 128), nn.ReLU(),
        nn.Linear(128, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )


def make_dataset(n=800, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (n,), generator=g)
    protos = torch.randn(10, 32, generator=torch.Generator().manual_seed(99))
    return TensorDataset(protos[y] + 0.8 * torch.randn(n, 32, generator=g), y)


def pretrain_base():
    """Stands for the download of a base model: a short local training by rank 0."""
    torch.manual_seed(77)
    net, ds = build(), make_dataset(seed=5)
    opt = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(3):
        for x, y in DataLoader(ds, 100):
            opt.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
    torch.save(net.state_dict(), CKPT)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        pretrain_base()
    dist.barrier()

    torch.manual_seed(0)
    model = build()
    if rank == 0:                      # avoid reading a 20 GB file on every rank
        model.load_state_dict(torch.load(CKPT))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)

    start = {n: p.full_tensor().clone() for n, p in model.state_dict().items()}
    data = make_dataset(seed=1)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=25, sampler=sampler, num_workers=1)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            if rank == 0 and epoch == 0 and step == 0:
                print(f"first loss of the fine-tuning: {loss.item():.3f}")
    if rank == 0:
        base = torch.load(CKPT)
        lost = sum((start[n] != base[n]).sum().item() for n in base)
        print(f"weights that were not the pretrained ones: {lost} of {sum(v.numel() for v in base.values())}")
        os.remove(CKPT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
