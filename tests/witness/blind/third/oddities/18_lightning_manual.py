"""Lightning with automatic optimization and sampler replacement both off: the module accumulates and steps by itself and brings its own DistributedSampler."""
import warnings

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

warnings.filterwarnings("ignore")


class ManualModule(L.LightningModule):
    def __init__(self, accumulate=2):
        super().__init__()
        self.automatic_optimization = False
        self.accumulate = accumulate
        self.enc = nn.Sequential(nn.Linear(25, 16), nn.ELU(), nn.Linear(16, 5))
        self.dec = nn.Sequential(nn.Linear(5, 16), nn.ELU(), nn.Linear(16, 25))
        self.updates = 0

    def training_step(self, batch, batch_idx):
        opt, sched = self.optimizers(), self.lr_schedulers()
        (x,) = batch
        loss = nn.functional.mse_loss(self.dec(self.enc(x)), x)
        self.manual_backward(loss / self.accumulate)
        if (batch_idx + 1) % self.accumulate == 0:
            self.clip_gradients(opt, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            opt.step()
            opt.zero_grad()
            sched.step()
            self.updates += 1
        self.last = loss.detach()

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=5e-3)
        return [opt], [torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=60)]

    def train_dataloader(self):
        g = torch.Generator().manual_seed(2)
        data = TensorDataset(torch.randn(800, 5, generator=g) @ torch.randn(5, 25, generator=g))
        return DataLoader(data, batch_size=10, sampler=DistributedSampler(data, shuffle=True, seed=3))


def main():
    L.seed_everything(1)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, use_distributed_sampler=False, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    module = ManualModule()
    trainer.fit(module)
    print(f"rank {dist.get_rank()}: {module.updates} updates, loss {module.last.item():.4f}, "
          f"weight norm {module.enc[0].weight.norm().item():.6f}")


if __name__ == "__main__":
    main()
