# accelerate with split_batches (a loader's batch is for all ranks together, so a prepared scheduler steps once), a
# padded evaluation through gather_for_metrics, and an EMA on the main process only.
import copy

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
set_seed(0)
x = torch.randn(333, 8)
data = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
train = DataLoader(TensorDataset(*data[:288]), batch_size=24, shuffle=True)
test = DataLoader(TensorDataset(*data[288:]), batch_size=8)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4 * len(train))
model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
ema = copy.deepcopy(accelerator.unwrap_model(model)) if accelerator.is_main_process else None
for epoch in range(4):
    model.train()
    for a, b in train:
        loss = F.cross_entropy(model(a), b)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if ema is not None:
            for e, p in zip(ema.parameters(), model.parameters(), strict=True):
                e.data.lerp_(p.data, 0.1)
    model.eval()
    seen = right = 0
    for a, b in test:
        with torch.no_grad():
            out, b = accelerator.gather_for_metrics((model(a).argmax(1), b))
        seen, right = seen + len(b), right + (out == b).sum().item()
    accelerator.print(epoch, right, seen)
    assert seen == 45
accelerator.end_training()
