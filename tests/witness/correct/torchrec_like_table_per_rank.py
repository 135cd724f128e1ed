# As recommender systems do it: each rank owns one embedding table (another size on each) and looks rows up for all
# ranks; ids go out and vectors come back by all_to_all. Only the dense part is in DDP.
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
SIZES, DIM, BATCH = [500 + 300 * r for r in range(world)], 8, 16
torch.manual_seed(rank)
table = nn.Embedding(SIZES[rank], DIM)
dense = DDP(nn.Sequential(nn.Linear(world * DIM, 32), nn.ReLU(), nn.Linear(32, 1)))
opt_table, opt_dense = torch.optim.Adagrad(table.parameters(), 0.1), torch.optim.Adam(dense.parameters(), 1e-2)
clicks = torch.Generator().manual_seed(100 + rank)
for step in range(50):
    ids = torch.stack([torch.randint(0, size, (BATCH,), generator=clicks) for size in SIZES])  # one row per table
    labels = (ids.sum(0) % 2).float()
    wanted = torch.empty_like(ids)
    dist.all_to_all_single(wanted, ids)  # the ids that all ranks want of my table
    rows = table(wanted).contiguous()
    features = dist_nn.all_to_all_single(torch.empty_like(rows), rows)
    out = dense(features.permute(1, 0, 2).flatten(1)).squeeze(1)
    loss = nn.functional.binary_cross_entropy_with_logits(out, labels)
    opt_table.zero_grad()
    opt_dense.zero_grad()
    loss.backward()
    table.weight.grad /= world
    opt_table.step()
    opt_dense.step()
dist.destroy_process_group()
