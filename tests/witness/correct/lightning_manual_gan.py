# Lightning with manual optimization and two optimizers: Lightning injects the sampler and its set_epoch, the module
# toggles gradients, and a metric is reduced by sync_dist.
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.g = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.d = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Linear(16, 1))

    def configure_optimizers(self):
        return torch.optim.Adam(self.g.parameters(), 1e-3), torch.optim.Adam(self.d.parameters(), 2e-3)

    def training_step(self, batch, _):
        (real,) = batch
        opt_g, opt_d = self.optimizers()
        noise = torch.randn(len(real), 4)
        self.toggle_optimizer(opt_d)
        loss_d = F.softplus(-self.d(real)).mean() + F.softplus(self.d(self.g(noise).detach())).mean()
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.toggle_optimizer(opt_g)
        loss_g = F.softplus(-self.d(self.g(noise))).mean()
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.log("d", loss_d, sync_dist=True, on_step=False, on_epoch=True)

    def on_train_end(self):
        sums = self.all_gather(torch.stack([p.detach().sum() for p in self.parameters()]))
        assert torch.equal(sums[0], sums[1])


L.seed_everything(1, verbose=False)
data = TensorDataset(torch.randn(192, 2) * 0.2 + 1)
trainer = L.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp_find_unused_parameters_true",
    max_epochs=4,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
torch.manual_seed(1 + trainer.global_rank)  # the noise of each rank is its own
trainer.fit(GAN(), DataLoader(data, 8, shuffle=True))
