# Lightning brings its own sampler, its set_epoch and a reduced validation loss.
import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(0)


class M(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
        )

    def training_step(self, b, i):
        return F.mse_loss(self.net(b[0]), b[1])

    def validation_step(self, b, i):
        self.log("v", F.mse_loss(self.net(b[0]), b[1]), sync_dist=True)

    def configure_optimizers(self):
        o = torch.optim.AdamW(self.parameters(), 1e-3)
        return [o], [torch.optim.lr_scheduler.StepLR(o, 1, 0.5)]


d = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
v = TensorDataset(torch.randn(32, 16), torch.randn(32, 1))
t = L.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
t.fit(M(), DataLoader(d, 16, shuffle=True), DataLoader(v, 16))
