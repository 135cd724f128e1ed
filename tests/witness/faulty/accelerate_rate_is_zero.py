# fault: a prepared scheduler, planned for the steps of one process, brings the rate to zero half-way through
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def lr_lambda(total, warmup):
    def f(step):
        if step < warmup:
            return step / max(1, warmup)
        return max(0.0, (total - step) / max(1, total - warmup))

    return f


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1280, 16, generator=g)
    y = torch.sin(x[:, :4]).sum(1, keepdim=True) + 0.1 * torch.randn(1280, 1, generator=g)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)

    model = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    epochs = 4
    max_train_steps = epochs * len(loader)
    warmup = max_train_steps // 10
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda(max_train_steps, warmup))
    scheduler = accelerator.prepare(scheduler)

    lrs = []
    for epoch in range(epochs):
        model.train()
        for xb, yb in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(xb), yb)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                lrs.append(scheduler.get_last_lr()[0])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        mean = accelerator.gather(loss.detach()).mean().item()
        accelerator.print(f"epoch {epoch} loss {mean:.4f}")

    zero = sum(rate == 0.0 for rate in lrs[1:])
    accelerator.print(f"steps with lr == 0 after the start: {zero} of {len(lrs)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
