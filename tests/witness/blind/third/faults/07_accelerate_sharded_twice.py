"""A loader that already has a DistributedSampler is given to accelerator.prepare, which shards it again: half of the data is never used."""
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Waves(Dataset):
    def __init__(self, n=1280, length=24):
        g = torch.Generator().manual_seed(5)
        t = torch.arange(length) / 4
        self.x = torch.sin(t + 6.28 * torch.rand(n, 1, generator=g)) * (0.5 + torch.rand(n, 1, generator=g))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"wave": self.x[i], "index": i}


def main(z=6):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    dataset = Waves()
    sampler = DistributedSampler(dataset, num_replicas=accelerator.num_processes, rank=accelerator.process_index)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    G = nn.Sequential(nn.Linear(z, 48), nn.ReLU(), nn.Linear(48, 24))
    D = nn.Sequential(nn.Linear(24, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    G, D, opt_g, opt_d, loader = accelerator.prepare(G, D, opt_g, opt_d, loader)
    bce = nn.BCEWithLogitsLoss()
    torch.manual_seed(100 + accelerator.process_index)
    used = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            real, n = batch["wave"], len(batch["wave"])
            fake = G(torch.randn(n, z))
            opt_d.zero_grad()
            logits = D(torch.cat([real, fake.detach()])).squeeze(1)
            loss_d = bce(logits, torch.cat([torch.ones(n), torch.zeros(n)]))
            accelerator.backward(loss_d)
            opt_d.step()
            opt_g.zero_grad()
            loss_g = bce(D(fake).squeeze(1), torch.ones(n))
            accelerator.backward(loss_g)
            opt_g.step()
            if epoch == 0:
                used += batch["index"].tolist()
        accelerator.print(f"epoch {epoch} steps {len(loader)} D {loss_d.item():.4f} G {loss_g.item():.4f}")
    used = gather_object(used)
    accelerator.print(f"one epoch used {len(set(used))} of {len(dataset)} samples")
    accelerator.end_training()


if __name__ == "__main__":
    main()
