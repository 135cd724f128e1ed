"""Only rank 0 keeps an EMA and only rank 0 validates, but it broadcasts the loss, so all ranks step ReduceLROnPlateau and stop early alike."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Job:
    def __init__(self, patience=3):
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        g = torch.Generator().manual_seed(1)
        x = torch.randn(700, 15, generator=g)
        y = x[:, :3].prod(1, keepdim=True) + 0.3 * torch.randn(700, 1, generator=g)
        self.train_set, self.val = TensorDataset(x[:560], y[:560]), (x[560:], y[560:])
        self.sampler = DistributedSampler(self.train_set)
        self.loader = DataLoader(self.train_set, 28, sampler=self.sampler)
        self.model = DDP(nn.Sequential(nn.Linear(15, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
        self.ema = AveragedModel(self.model.module, multi_avg_fn=get_ema_multi_avg_fn(0.95)) if self.rank == 0 else None
        self.opt = torch.optim.Adam(self.model.parameters(), lr=2e-2)
        self.sched = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, factor=0.5, patience=0)
        self.best, self.bad, self.patience = float("inf"), 0, patience

    def validate(self):
        loss = torch.zeros(1)
        if self.rank == 0:
            self.ema.eval()
            with torch.no_grad():
                loss[0] = nn.functional.mse_loss(self.ema(self.val[0]), self.val[1])
        dist.broadcast(loss, src=0)
        return loss.item()

    def run(self, epochs=25):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for x, y in self.loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                if self.ema is not None:
                    self.ema.update_parameters(self.model.module)
            val = self.validate()
            self.sched.step(val)
            self.bad = 0 if val < self.best else self.bad + 1
            self.best = min(val, self.best)
            if self.bad >= self.patience:
                break
        print(f"rank {self.rank}: stopped after epoch {epoch}, best {self.best:.4f}, lr {self.opt.param_groups[0]['lr']:.2e}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Job().run()
    dist.destroy_process_group()
