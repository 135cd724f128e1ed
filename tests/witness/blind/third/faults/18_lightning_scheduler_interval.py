"""A warm-up and cosine schedule counted in steps is returned without interval="step", so Lightning steps it once an epoch and the rate stays in warm-up."""
import math
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


class LitClassifier(L.LightningModule):
    def __init__(self, lr=3e-3, warmup_steps=10, max_steps=80):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))
        self.lrs = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        self.lrs.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        h = self.hparams
        optimizer = torch.optim.AdamW(self.parameters(), lr=h.lr)

        def schedule(step):
            if step < h.warmup_steps:
                return (step + 1) / h.warmup_steps
            return 0.5 * (1 + math.cos(math.pi * (step - h.warmup_steps) / (h.max_steps - h.warmup_steps)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        return [optimizer], [scheduler]


def dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 24, generator=g)
    return TensorDataset(x, x[:, :5].argmax(1))


def main():
    L.seed_everything(0)
    model = LitClassifier()
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=4, logger=False, num_sanity_val_steps=0,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, DataLoader(dataset(640, 0), 16, shuffle=True), DataLoader(dataset(160, 1), 40))
    if trainer.is_global_zero:
        print(f"steps {len(model.lrs)}, val loss {trainer.callback_metrics['val_loss'].item():.3f}")
        print(f"rates used: {sorted({round(x, 6) for x in model.lrs})}; peak meant {model.hparams.lr}, end meant 0")


if __name__ == "__main__":
    main()
