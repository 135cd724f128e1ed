"""The scheduler is not given to accelerator.prepare and is stepped by hand once an update: its length counts updates, so Accelerate must not step it per process."""
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(epochs=4, accum=2, batch=8, peak=4e-3):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accum)
    set_seed(7)
    x = torch.randn(608, 20, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=batch, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    updates = epochs * math.ceil(len(loader) / accum)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, T_max=updates)
    done = 0
    for epoch in range(epochs):
        model.train()
        for xb, yb in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(xb), yb)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
                done += 1
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.2e}")
    accelerator.print(f"updates {done} of {updates}, last lr {scheduler.get_last_lr()[0]:.1e}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
