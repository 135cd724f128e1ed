"""The backbone is unfrozen after one epoch, but configure_optimizers filtered by requires_grad at the start, so the backbone never trains."""
import logging
import tempfile
import warnings
import torch
import torch.nn as nn
import lightning as L
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class UnfreezeBackbone(L.Callback):
    def __init__(self, at_epoch):
        self.at_epoch = at_epoch

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.at_epoch:
            for p in pl_module.backbone.parameters():
                p.requires_grad_(True)


class Classifier(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(64, 6)
        for p in self.backbone.parameters():
            p.requires_grad_(False)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        params = filter(lambda p: p.requires_grad, self.parameters())
        opt = torch.optim.AdamW(params, lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.trainer.max_epochs)
        return [opt], [sched]


def main():
    L.seed_everything(0)
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 6, (480,), generator=g)
    x = torch.randn(6, 1, 12, 12, generator=g)[y] + 0.5 * torch.randn(480, 1, 12, 12, generator=g)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    model = Classifier()
    before = model.backbone[0].weight.detach().clone()
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=4,
                        default_root_dir=tempfile.mkdtemp(), logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False,
                        callbacks=[UnfreezeBackbone(1)])
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        print("final train loss", float(trainer.callback_metrics["train_loss"]))
        print("backbone moved by (should be > 0):", (model.backbone[0].weight - before).abs().max().item())


if __name__ == "__main__":
    main()
