"""What watching costs a training by transformers' Trainer, as a share of its step.

    python benchmarks/watched_trainer.py            (about a minute on an idle machine)
    python benchmarks/watched_trainer.py 3200       (3,200 blocks instead of 160: a narrower interval)

Within one launched process labkit's hooks are taken off and put back every two steps. The figures are CPU time of the
training thread, which other programs on the machine slow but do not add to: the median over pairs of neighbouring
blocks, with a 95 % interval by resampling. labkit's own threads are counted apart, as a share of one core.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

import labkit

BLOCKS, BLOCK = int(sys.argv[1]) if len(sys.argv) > 1 else 160, 2
SCRIPT = """
import json
import os
import sys
import threading
import time

import torch
from torch.optim import optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

BLOCKS, BLOCK, WARM = int(sys.argv[1]), int(sys.argv[2]), 10
torch.set_num_threads(1)  # or the operators' threads are not counted
places = [(_BaseDataLoaderIter, "__next__"), (torch.autograd, "backward"), (torch.autograd, "grad"),
          (torch.amp.GradScaler, "scale"), (torch.amp.GradScaler, "step")]
hooked = [getattr(*place) for place in places]
tables = [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
registered = [dict(table) for table in tables]
assert all(registered) and all(hasattr(function, "__wrapped__") for function in hooked), "labkit is not watching"


def watch(on):
    for place, function in zip(places, hooked):
        setattr(*place, function if on else function.__wrapped__)
    for table, hooks in zip(tables, registered):
        table.clear()
        table.update(hooks if on else {})


def ticks():
    others = [t.native_id for t in threading.enumerate() if t is not threading.main_thread()]
    parts = [open(f"/proc/self/task/{n}/stat").read().rpartition(")")[2].split() for n in others]
    return sum(int(part[11]) + int(part[12]) for part in parts) / os.sysconf("SC_CLK_TCK")


class Alternate(TrainerCallback):
    times = []

    def on_step_end(self, args, state, control, **more):
        number, rest = divmod(state.global_step - WARM, BLOCK)
        if number >= 0 and rest == 0:
            if self.times:
                self.times[-1][1] = time.thread_time() - self.started
            else:
                self.began, self.threads = time.perf_counter(), ticks()
            on = (number + number // 2) % 2 == 0  # watched, not, not, watched: a drift cancels
            watch(on)
            self.times.append([on, 0.0])
            self.started = time.thread_time()


model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=4, n_head=4))
ids = torch.randint(0, 512, (256, 64))
arguments = TrainingArguments("out", max_steps=WARM + BLOCKS * BLOCK, per_device_train_batch_size=8, logging_steps=10,
                              save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True)
alternate = Alternate()
texts = [{"input_ids": row, "labels": row} for row in ids]
Trainer(model, arguments, train_dataset=texts, callbacks=[alternate]).train()
seconds = time.perf_counter() - alternate.began
print(json.dumps({"times": alternate.times[:-1], "threads": (ticks() - alternate.threads) / seconds}))
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):  # what labkit says of itself
        os.environ["LABKIT_RUNS"] = folder
        script = Path(folder) / "trainer.py"
        script.write_text(SCRIPT)
        run = labkit.launch(script, nproc_per_node=1, args=[BLOCKS, BLOCK], wait=True)
        measured = json.loads(run.logs(rank=0).splitlines()[-1])
    times = measured["times"]
    pairs = [dict(pair) for pair in zip(times[::2], times[1::2], strict=False) if pair[0][0] != pair[1][0]]
    ratios = [pair[True] / pair[False] - 1 for pair in pairs]
    choose = random.Random(0)
    medians = sorted(statistics.median(choose.choices(ratios, k=len(ratios))) for _ in range(2000))
    step = statistics.median(pair[False] for pair in pairs) / BLOCK
    print(f"a step without labkit     {step * 1e3:6.2f} ms of the training thread")
    print(f"watched                   {statistics.median(ratios):+6.2%}, 95 % interval {medians[50]:+.2%} to "
          f"{medians[-50]:+.2%}, {len(pairs)} pairs of {BLOCK} steps")  # fmt: skip
    print(f"labkit's own threads      {measured['threads']:6.2%} of a core")


if __name__ == "__main__":
    main()
