"""Lightning's sampler is switched off and validation runs with dropout on: the script's batch sampler shares out same-length batches itself, and MC dropout measures uncertainty."""
import logging
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Sequences(Dataset):
    def __init__(self, n=600, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(2, 6, (n,), generator=g).mul(3).tolist()
        self.x = [torch.randn(k, 6, generator=g) for k in self.lengths]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], (self.x[i][:, 0].sum() > 0).long()


class BucketBatches:
    """Batches of one length each, in an order common to all ranks; rank r takes every world-th of them."""

    def __init__(self, lengths, batch_size, rank, world):
        self.lengths, self.batch_size, self.rank, self.world, self.epoch = lengths, batch_size, rank, world, 0

    def batches(self):
        g = torch.Generator().manual_seed(90 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=g).tolist()
        out = []
        for k in sorted(set(self.lengths)):
            same = [i for i in order if self.lengths[i] == k]
            out += [same[s : s + self.batch_size] for s in range(0, len(same) - self.batch_size + 1, self.batch_size)]
        out = [out[i] for i in torch.randperm(len(out), generator=g)]
        return out[: len(out) // self.world * self.world]

    def __iter__(self):
        mine = self.batches()[self.rank :: self.world]
        self.epoch += 1
        return iter(mine)

    def __len__(self):
        return len(self.batches()) // self.world


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.rnn, self.drop, self.out = nn.GRU(6, 32, batch_first=True), nn.Dropout(0.3), nn.Linear(32, 2)

    def forward(self, x):
        return self.out(self.drop(self.rnn(x)[1][-1]))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_validation_model_eval(self):
        self.train()

    def validation_step(self, batch, batch_idx):
        p = torch.stack([self(batch[0]).softmax(-1) for _ in range(10)])
        self.log("mc_std", p[..., 1].std(0).mean(), sync_dist=True, batch_size=len(batch[1]))
        self.log("acc", (p.mean(0).argmax(-1) == batch[1]).float().mean(), sync_dist=True, batch_size=len(batch[1]))

    def train_dataloader(self):
        ds = Sequences()
        return DataLoader(ds, batch_sampler=BucketBatches(ds.lengths, 20, self.global_rank, self.trainer.world_size))

    def val_dataloader(self):
        ds = Sequences(160, seed=1)
        return DataLoader(ds, batch_sampler=BucketBatches(ds.lengths, 10, self.global_rank, self.trainer.world_size))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=4e-3)


if __name__ == "__main__":
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=5, use_distributed_sampler=False, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)
    torch.manual_seed(trainer.global_rank)
    trainer.fit(Net())
    if trainer.is_global_zero:
        print(trainer.global_step, {k: round(v.item(), 3) for k, v in trainer.callback_metrics.items()})
