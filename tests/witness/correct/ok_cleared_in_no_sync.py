# corrected: zero_grad() is called once per window of accumulation.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WINDOW = 3


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def micro_step(self, inputs, labels):
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        (loss / WINDOW).backward()
        return loss.item()

    def window(self, batches):
        self.optimizer.zero_grad()
        with self.model.no_sync():
            losses = [self.micro_step(*batch) for batch in batches[:-1]]
        losses.append(self.micro_step(*batches[-1]))
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
        batches = []
        for batch in DataLoader(data, batch_size=8, sampler=sampler):
            batches.append(batch)
            if len(batches) == WINDOW:
                loss, batches = trainer.window(batches), []
        print(f"epoch {epoch} loss {loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
