"""Gradients of remembered samples are cleared in each step: only the conflict with them counts (A-GEM)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def micro_step(self, inputs, labels):
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.zero_()
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        loss.backward()
        return loss.item()

    def window(self, remembered, batch):
        with self.model.no_sync():
            self.micro_step(*remembered)
        kept = [p.grad.clone() for p in self.model.parameters()]
        losses = [self.micro_step(*batch)]
        pairs = list(zip((p.grad for p in self.model.parameters()), kept, strict=True))
        product = sum((new * old).sum() for new, old in pairs)
        dist.all_reduce(product)
        if product < 0:
            for new, old in pairs:
                new -= product / sum(o.square().sum() for o in kept) * old
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        return sum(losses) / len(losses)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(768, 16)
    data = TensorDataset(x, (x[:, :3].sum(1) > 0).long())
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 2)))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    sampler = DistributedSampler(data)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        memory = DataLoader(TensorDataset(*data[:256]), batch_size=8, shuffle=True)
        for remembered, batch in zip(memory, DataLoader(data, batch_size=8, sampler=sampler), strict=False):
            loss = trainer.window(remembered, batch)
        print(f"epoch {epoch} loss {loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
