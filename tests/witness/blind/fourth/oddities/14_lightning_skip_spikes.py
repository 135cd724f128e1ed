"""Right on purpose: a spike guard drops the update (gradients set to None) when the global gradient norm is over 3x its running mean, because a few batches are known to be corrupt."""
import logging
import tempfile
import warnings
import torch
import torch.nn as nn
import lightning as L
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class SpikeGuard(L.Callback):
    def __init__(self, factor=3.0, warm=10):
        self.factor, self.warm, self.mean, self.n, self.skipped = factor, warm, 0.0, 0, []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm().item()   # already averaged by DDP: alike on all ranks
        if self.n >= self.warm and norm > self.factor * self.mean:
            for p in pl_module.parameters():
                p.grad = None
            self.skipped.append(trainer.global_step)
            return
        self.mean = norm if self.n == 0 else 0.9 * self.mean + 0.1 * norm
        self.n += 1


class Forecaster(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(1, 24, batch_first=True)
        self.out = nn.Linear(24, 1)

    def training_step(self, batch, _):
        x, y = batch
        pred = self.out(self.rnn(x)[0][:, -1])
        loss = nn.functional.mse_loss(pred, y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def series(n=640, T=16):
    g = torch.Generator().manual_seed(2)
    t = torch.arange(T + 1) * 0.4 + torch.rand(n, 1, generator=g) * 6
    s = t.sin() + 0.05 * torch.randn(n, T + 1, generator=g)
    bad = torch.randperm(n, generator=g)[:4]
    s[bad, -1] += 60.0                                # sensor glitches in the target
    return TensorDataset(s[:, :-1, None], s[:, -1:])


def main():
    L.seed_everything(0)
    guard = SpikeGuard()
    model = Forecaster()
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False,
                        default_root_dir=tempfile.mkdtemp(), enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False, callbacks=[guard])
    trainer.fit(model, DataLoader(series(), batch_size=16, shuffle=True))
    if trainer.is_global_zero:
        print(f"final loss {float(trainer.callback_metrics['train_loss']):.4f}, updates dropped on purpose at steps {guard.skipped}")


if __name__ == "__main__":
    main()
