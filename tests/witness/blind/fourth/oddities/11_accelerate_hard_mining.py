"""Right on purpose: online hard example mining, a forward over the whole batch scores it, only the hardest quarter is trained on and batches that are all easy on every rank make no step."""
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def imbalanced(n=2560):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 12, generator=g)
    return TensorDataset(x, ((x[:, 0] + x[:, 1]) > 1.8).float())


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    model = Detector()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(imbalanced(), batch_size=32, shuffle=True, drop_last=True)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    bce = nn.BCEWithLogitsLoss(reduction="none")
    stats = {"seen": 0, "trained": 0, "steps": 0, "skipped": 0}

    for epoch in range(3):
        for x, y in loader:
            with torch.no_grad():
                score = bce(accelerator.unwrap_model(model)(x), y)
            stats["seen"] += len(x)
            hardest = score.topk(8).indices
            # all ranks decide alike, from the gathered maximum
            top = accelerator.gather(score.max().reshape(1)).max()
            if top < 0.4:
                stats["skipped"] += 1
                continue
            loss = bce(model(x[hardest]), y[hardest]).mean()
            opt.zero_grad()
            accelerator.backward(loss)
            opt.step()
            stats["trained"] += 8
            stats["steps"] += 1
        full = accelerator.gather(score.mean().reshape(1)).mean().item()
        accelerator.print(f"epoch {epoch} mean loss of all examples {full:.4f}")

    accelerator.print("mined:", stats)
    accelerator.end_training()


if __name__ == "__main__":
    main()
