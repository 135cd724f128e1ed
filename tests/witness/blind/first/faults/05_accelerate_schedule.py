# fault: the schedule's length is counted in steps of the prepared loader, but accelerate's scheduler moves on by two (the number of processes) at each step, so that the learning rate is zero for the second half of the training.
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import make_classification
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup


def main(epochs=4, batch_size=32, lr=5e-3):
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    x, y = make_classification(1280, 40, n_informative=20, n_classes=4, random_state=42)
    dataset = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
    train_dataloader = DataLoader(dataset, batch_size=batch_size, shuffle=True)

    model = nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)

    max_train_steps = epochs * len(train_dataloader)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, max_train_steps // 10, max_train_steps)
    lr_scheduler = accelerator.prepare(lr_scheduler)

    for epoch in range(epochs):
        model.train()
        for features, target in train_dataloader:
            loss = nn.functional.cross_entropy(model(features), target)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        mean_loss = accelerator.gather(loss.detach()).mean().item()
        accelerator.print(f"epoch {epoch}: loss {mean_loss:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
