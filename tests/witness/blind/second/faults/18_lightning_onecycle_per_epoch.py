"""OneCycleLR is counted in optimizer steps but Lightning steps it once an epoch (its default interval), so the training ends in the first moments of the warm-up."""
import logging
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class SensorData(L.LightningDataModule):
    def setup(self, stage=None):
        g = torch.Generator().manual_seed(40)
        x = torch.randn(720, 3, 20, generator=g)
        y = (x.cumsum(-1)[:, 0].amax(-1) > 3.5).long() + (x[:, 1, -5:].sum(-1) > 0).long()
        full = TensorDataset(x, y)
        self.train, self.val = torch.utils.data.random_split(full, [640, 80], generator=g)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=40)


class Classifier(L.LightningModule):
    def __init__(self, max_lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.gru = nn.GRU(3, 32, batch_first=True)
        self.fc = nn.Linear(32, 3)
        self.lrs = []

    def forward(self, x):
        return self.fc(self.gru(x.transpose(1, 2))[1][-1])

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        self.lrs.append(self.optimizers().param_groups[0]["lr"])
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.max_lr / 25)
        sched = torch.optim.lr_scheduler.OneCycleLR(
            opt, max_lr=self.hparams.max_lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return [opt], [sched]


def main():
    L.seed_everything(1)
    model = Classifier()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=5, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
    )
    trainer.fit(model, SensorData())
    if trainer.is_global_zero:
        acc = trainer.callback_metrics["val_acc"].item()
        print(f"{trainer.global_step} steps, largest lr {max(model.lrs):.2e} of max_lr 1.00e-02, last lr {model.lrs[-1]:.2e}; val acc {acc:.2f}")


if __name__ == "__main__":
    main()
