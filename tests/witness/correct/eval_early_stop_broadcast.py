# Early stopping decided by rank 0, which alone evaluates, and broadcast to all: they leave the loop together in the
# middle of an epoch. The callbacks are objects, and only rank 0 has the ones that print and keep the best weights.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Callback:
    def on_step(self, trainer, loss): ...


class Printer(Callback):
    def on_step(self, trainer, loss):
        if trainer.step % 20 == 0:
            print(trainer.step, loss)


class KeepBest(Callback):
    best, weights = float("inf"), None

    def on_step(self, trainer, loss):
        if loss < self.best:
            self.best = loss
            self.weights = {k: v.clone() for k, v in trainer.model.module.state_dict().items()}


class EarlyStop(Callback):
    def __init__(self, val, below):
        self.val, self.below = val, below

    def on_step(self, trainer, loss):
        flag = torch.zeros(1)
        if dist.get_rank() == 0 and trainer.step % 5 == 0:
            with torch.no_grad():
                x, y = self.val
                flag += float(nn.functional.mse_loss(trainer.model.module(x), y) < self.below)
        dist.broadcast(flag, src=0)
        trainer.stop = bool(flag)


class Trainer:
    def __init__(self, model, callbacks):
        self.model, self.callbacks, self.step, self.stop = DDP(model), callbacks, 0, False
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)

    def fit(self, data, epochs):
        sampler = DistributedSampler(data)
        loader = DataLoader(data, 8, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.step += 1
                for callback in self.callbacks:
                    callback.on_step(self, loss.item())
                if self.stop:
                    return


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(400, 4)
y = x @ torch.randn(4, 1)
only_first = [Printer(), KeepBest()] if dist.get_rank() == 0 else []
trainer = Trainer(nn.Linear(4, 1), [*only_first, EarlyStop((x[320:], y[320:]), below=0.05)])
trainer.fit(TensorDataset(x[:320], y[:320]), epochs=30)
assert trainer.stop
dist.destroy_process_group()
