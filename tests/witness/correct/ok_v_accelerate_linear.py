# corrected: the schedule is planned with the steps of all processes, which accelerate counts
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))
loader = DataLoader(data, batch_size=16, shuffle=True)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = 3 * len(loader) * accelerator.num_processes
scheduler = accelerator.prepare(get_linear_schedule_with_warmup(optimizer, 2, steps))
idle = 0
for epoch in range(3):
    for a, b in loader:
        idle += optimizer.param_groups[0]["lr"] == 0
        loss = F.mse_loss(model(a), b)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
accelerator.print("steps with a learning rate of 0:", idle, "of", 3 * len(loader))
accelerator.end_training()
