"""GPT-2 small as labkit's script and as a loop by hand: what the first tests of the suite train.

python tests/gpu/gpt2.py 1xH100        (prints what is planned for a device)
"""

from __future__ import annotations

import re
import sys
import textwrap
from functools import cache
from typing import Any

import labkit
from labkit import Script
from labkit.planner.model.facts import facts_of

SMALL, TINY = (50304, 1024, 768, 12, 12), (512, 64, 64, 2, 2)  # vocabulary, context, width, heads, layers
BATCH = 8
FUSED: dict[str, Any] = {"optimizer": "adamw_fused"}
# Without a precision: in 16 bits. What tells most comes first.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("single", {}),
    ("fsdp", {}),
    ("single", {"compile": True, **FUSED}),
    ("ddp", FUSED),
    ("single", {"precision": "fp32"}),
    ("single", {"activation_checkpointing": True, **FUSED}),
]
MLP = "self.down(F.gelu(self.up(self.norm2(x))))"  # in the model's cell
TIMED = """if step in ({warm}, {last}) and device.type == "cuda":
    torch.cuda.synchronize()
if step == {warm}:
    ends, computed = [], (time.thread_time(), time.process_time())
if step >= {warm}:
    ends.append(time.perf_counter())
if step == {last}:
    thread, process = time.thread_time() - computed[0], time.process_time() - computed[1]
    times = sorted(end - begin for begin, end in zip(ends, ends[1:]))
    tenths = [times[len(times) * part // 10] for part in (1, 5, 9)]
    print("seconds", ends[-1] - ends[0], *tenths, thread, process, flush=True)
"""
BY_HAND = """
# %% loop
import os
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader

cuda = torch.cuda.is_available()
device = torch.device("cuda", 0) if cuda else torch.device("cpu")
dist.init_process_group("nccl" if cuda else "gloo")
torch.manual_seed(0)
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler(device.type, enabled={half} == torch.float16)
train, _ = load_datasets("")
step = 0
while step < {last}:
    for x, y in DataLoader(train, batch_size={batch}, shuffle=True, drop_last=True, pin_memory=cuda):
        if step < {last}:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with torch.autocast(device.type, {half}):
                logits = model(x)
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            step += 1
dist.destroy_process_group()
"""


def gpt2(strategy: str, size: tuple[int, ...] = SMALL, model: str = "") -> Script:
    """`model`: another text of the model's cell, of the same arguments."""
    script = Script.load(strategy, "precision", "optimizers", "recompute_and_compile")
    return script.with_cells(
        model=_replaced(
            model or script.cells["model"].text,
            "vocabulary=256, context=128, width=128, heads=4, layers=4",
            "vocabulary={}, context={}, width={}, heads={}, layers={}".format(*size),
        ),
        data=_replaced(script.cells["data"].text, "context=128, limit=2**20", f"context={size[1]}, limit=2**23"),
    )


def with_dropout_and_rms_norm() -> str:
    """The model's cell, changed."""
    text = Script.load("single").cells["model"].text
    text = _replaced(text, "nn.LayerNorm", "nn.RMSNorm")
    text = _replaced(text, "is_causal=True)", "is_causal=True, dropout_p=0.1 if self.training else 0.0)")
    return _replaced(text, MLP, f"F.dropout({MLP}, 0.1, self.training)")


def timed(text: str, warm: int, last: int) -> str:
    """The script, printing the seconds from the end of step `warm` to the end of step `last`, those of the steps within
    which a tenth, half and nine tenths of them took, and what its thread and its process computed meanwhile."""
    step_ends = re.search(r"^( +)step \+= 1\n", text, re.MULTILINE)
    assert step_ends is not None
    lines = textwrap.indent(TIMED.format(warm=warm, last=last), step_ends[1])
    return text[: step_ends.end()] + lines + text[step_ends.end() :]


def by_hand(size: tuple[int, ...], half: str, warm: int, last: int) -> str:
    """A plain training script: the model, the data and the least that trains."""
    cells = gpt2("single", size).cells
    loop = timed(BY_HAND, warm, last).format(half=f"torch.{half}", batch=BATCH, last=last)
    return "".join([cells["model"].text, cells["data"].text, loop])


@cache
def flops(size: tuple[int, ...]) -> float:
    """Floating-point operations of a step: a backward is counted as two forwards, attention without its mask."""
    return 3.0 * BATCH * sum(unit.flops for unit in facts_of(gpt2("single", size), {}, ()).units)


def _replaced(text: str, old: str, new: str) -> str:
    assert old in text, old
    return text.replace(old, new)


def main() -> None:
    device = sys.argv[1]
    print("| strategy | options | memory | step | TFLOP/s |\n|---|---|---|---|---|")
    for strategy, options in CASES:
        options = {"precision": "bf16"} | options
        plan = labkit.plan(gpt2(strategy), nproc_per_node=1, global_batch_size=BATCH, device=device, **options)
        if plan.step is None:
            raise SystemExit(f"{device} has no published speed")
        milliseconds = [1e3 * seconds for seconds in (plan.step.seconds, plan.step.low, plan.step.high)]
        cells = [
            strategy,
            ", ".join(f"{name}={value}" for name, value in options.items()),
            f"{plan.bytes / 2**30:.2f} GiB",
            "{:.1f} ms ({:.1f} to {:.1f})".format(*milliseconds),
            f"{flops(SMALL) / plan.step.seconds / 1e12:.0f}",
        ]
        print("|", *(f"{cell} |" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
