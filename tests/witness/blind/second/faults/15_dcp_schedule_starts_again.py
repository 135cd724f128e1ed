"""The distributed checkpoint holds model and optimizer but not the scheduler, so the resumed FSDP2 job goes through warm-up and the cosine from the beginning again."""
import math
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TOTAL_STEPS, WARMUP, SAVE_AT = 80, 10, 40


def lr_at(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (TOTAL_STEPS - WARMUP)))


def build():
    torch.manual_seed(31)
    model = nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 3))
    for m in (model[0], model[2]):
        fully_shard(m)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_at)
    return model, optimizer, scheduler


def loader():
    g = torch.Generator().manual_seed(12)
    x = torch.randn(640, 24, generator=g)
    y = (x[:, :8].sum(1) > 0).long() + (x[:, 8:16].sum(1) > 0).long()
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds, shuffle=True)
    return DataLoader(ds, batch_size=32, sampler=sampler), sampler


def train(folder, start_step, end_step, resume=False):
    model, optimizer, scheduler = build()
    batches, sampler = loader()
    if resume:
        msd, osd = get_state_dict(model, optimizer)
        state = {"model": msd, "optim": osd}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    step, used = start_step, []
    while step < end_step:
        sampler.set_epoch(step // len(batches))
        for x, y in batches:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            used.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
            step += 1
            if step == end_step:
                break
    msd, osd = get_state_dict(model, optimizer)
    dcp.save({"model": msd, "optim": osd}, checkpoint_id=folder)
    return used


def main():
    dist.init_process_group("gloo")
    box = [tempfile.mkdtemp(prefix="dcp_")] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    folder = os.path.join(box[0], "step")
    used = train(folder, 0, SAVE_AT) + train(folder, SAVE_AT, TOTAL_STEPS, resume=True)
    if dist.get_rank() == 0:
        wanted = [4e-3 * lr_at(s) for s in range(TOTAL_STEPS)]
        for s in (0, SAVE_AT - 1, SAVE_AT, SAVE_AT + 10, TOTAL_STEPS - 1):
            print(f"step {s}: lr used {used[s]:.2e}, by the plan {wanted[s]:.2e}")
        shutil.rmtree(box[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
