# accelerate with accumulation: a prepared scheduler moves two steps at once, as it is planned for one process.
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

acc = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
val = TensorDataset(torch.randn(21, 16), torch.randn(21, 1))
loader, vloader = DataLoader(data, 16, shuffle=True), DataLoader(val, 4)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
sched = get_linear_schedule_with_warmup(opt, 4, 4 * 16 // 2)
model, opt, loader, vloader, sched = acc.prepare(model, opt, loader, vloader, sched)
for epoch in range(4):
    for a, b in loader:
        with acc.accumulate(model):
            loss = F.mse_loss(model(a), b)
            acc.backward(loss)
            opt.step()
            sched.step()
            opt.zero_grad()
    with torch.no_grad():
        out = torch.cat([acc.gather_for_metrics(F.mse_loss(model(a), b, reduction="none")) for a, b in vloader])
    acc.print(len(out), out.mean().item(), opt.param_groups[0]["lr"])
acc.end_training()
