# corrected: The script's own sampler gives each rank its part, and Lightning's Trainer splits nothing.
import logging
import os
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SPLITS = False  # whether Lightning does
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Strided:
    def __init__(self, size, rank, world):
        self.size, self.rank, self.world, self.epoch = size, rank, world, 0

    def __len__(self):
        return self.size // self.world

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1
        return iter(order[self.rank :: self.world])


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.layers(batch[0]), batch[1])

    def train_dataloader(self):
        x = torch.randn(320, 6, generator=torch.Generator().manual_seed(1))
        sampler = Strided(320, self.global_rank, self.trainer.world_size)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, sampler=sampler)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    quiet = {"logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_epochs=2,
                        use_distributed_sampler=SPLITS, **quiet)
    trainer.fit(Net())
