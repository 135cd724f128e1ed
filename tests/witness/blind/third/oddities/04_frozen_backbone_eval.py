"""Most of the model is frozen and stays in eval mode while training (BatchNorm statistics never move): a linear probe on a fixed backbone, as wanted."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(),
                                      nn.Conv2d(12, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(16 * 9, 4))
        self.backbone.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()  # keep the pretrained statistics
        return self

    def forward(self, x):
        with torch.no_grad():
            h = self.backbone(x)
        return self.head(h)


class ProbeTrainer:
    def __init__(self, lr=0.02):
        torch.manual_seed(0)
        g = torch.Generator().manual_seed(1)
        x = torch.randn(512, 3, 10, 10, generator=g)
        y = x[:, 0].flatten(1)[:, [11, 18, 81, 88]].argmax(1)
        self.data = TensorDataset(x, y)
        self.sampler = DistributedSampler(self.data)
        self.loader = DataLoader(self.data, 16, sampler=self.sampler)
        self.model = DDP(Probe())
        self.opt = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=lr, momentum=0.9)

    def run(self, epochs=3):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for x, y in self.loader:
                self.opt.zero_grad()
                loss = nn.functional.cross_entropy(self.model(x), y)
                loss.backward()
                self.opt.step()
            if dist.get_rank() == 0:
                bn = self.model.module.backbone[1]
                print(f"epoch {epoch} loss {loss.item():.3f} BatchNorm batches {int(bn.num_batches_tracked)}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ProbeTrainer().run()
    dist.destroy_process_group()
