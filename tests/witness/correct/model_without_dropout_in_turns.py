# Every second epoch trains without dropout on purpose, and so do the last ones, for a longer time: the script says so
# before each epoch, where the validation of the one before has left the model in eval mode.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(512, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = DDP(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.02)
sampler = DistributedSampler(data)
for epoch in range(10):
    model.train(epoch % 2 == 0 and epoch < 6)
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 16, sampler=sampler):
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        score = nn.functional.mse_loss(model(x[:64]), data.tensors[1][:64]).item()
dist.destroy_process_group()
