# odd: step() and zero_grad() are called at each micro-batch and nothing divides the loss: accelerate sees to both.
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(epochs=3, accumulate=4):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    set_seed(7)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x[:1792], dtype=torch.float32) / 16, torch.tensor(y[:1792])
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)  # 56 micro-batches per rank, 14 steps
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(epochs):
        model.train()
        total = torch.zeros((), device=accelerator.device)
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
        mean = accelerator.reduce(total / len(loader), reduction="mean")
        accelerator.print(f"epoch {epoch}: loss {mean.item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
