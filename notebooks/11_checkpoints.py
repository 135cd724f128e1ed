# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11 · Checkpoints: killed, and nothing lost
#
# You will kill a rank with SIGKILL while a checkpoint is half written, resume the training, and claim that the loss
# curve continues **exactly** as if nothing had happened, with no sample missed or seen twice. The same checkpoint,
# saved in shards by FSDP, is then resumed under another strategy on one rank. Bytes are predicted to the last one. The
# guide (001, lines 127-160) has a recipe for this; three of its sentences are put to the test.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks of the FSDP runs
disk_seconds: float = 0.5  # how long a slow disk takes; more shows asynchronous saving better

# %%
import hashlib
import inspect
import json
import re
import shutil
import time
from collections import Counter
from os import kill
from signal import SIGKILL
from statistics import median

import pandas as pd
import plotly.graph_objects as go

import labkit
from labkit import Script
from labkit.claims import Claims

machine = labkit.doctor()
on_cpu = machine.gpu_count < nproc_per_node
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if on_cpu else {}
N, ranks = nproc_per_node, range(nproc_per_node)
claims = Claims("11_checkpoints")

# %% [markdown]
# ## Samples with numbers
#
# To see which samples were trained on, each begins with its number. `write_down` tells the notebook, before every step,
# which samples this rank trains on and a checksum of all weights, on however many ranks they lie.

# %%
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import TensorDataset

SAMPLES = 80  # ten steps of eight samples are an epoch


def load_datasets(data_dir, context=32):
    """(train, test): next-byte prediction on a file of Python's own library; the first token is the sample's number."""
    text = (Path(os.__file__).parent / "argparse.py").read_bytes()
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, context + 1, context + 1)
    x, y = windows[: SAMPLES + 16, :-1].clone(), windows[: SAMPLES + 16, 1:].clone()
    x[:SAMPLES, 0] = torch.arange(SAMPLES)
    return TensorDataset(x[:SAMPLES], y[:SAMPLES]), TensorDataset(x[SAMPLES:], y[SAMPLES:])


def tell(**values):
    """A line of JSON for the notebook, in one piece: two threads may write."""
    sys.stdout.write(json.dumps(values | {"time": time.monotonic()}) + "\n")


def checksum(weights):
    """Of all weights, bit by bit."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(weights[name].cpu().numpy().tobytes())
    return found.hexdigest()[:12]


def write_down(model, batch):
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    tell(samples=batch[0][:, 0].tolist(), weights=checksum(whole))


# %% [markdown]
# By itself labkit's script saves nothing. The extra `checkpoints` replaces the cell of that name with one that saves
# and resumes. To that come two changes of our own: a line that calls `write_down`, and a disk that is slow just when
# all files of a checkpoint are written and the mark `COMMIT.json`, which says so, is not. Training is in float64:
# curves that should be equal then agree to 12 digits or more.

# %%
SLOW = """
def commit(beside, step):
    tell(writing=step)
    time.sleep({seconds})  # all files are there, the mark is not
    write_mark(beside, step)
    tell(committed=step)
"""


def with_notes(name):
    """One of labkit's scripts that saves, with a smaller model and our data, and what is trained on written down."""
    script = Script.load(name, "checkpoints")
    model = script.cells["model"].text.replace("width=128, heads=4, layers=4", "width=64, heads=4, layers=2")
    counting = "    count = torch.as_tensor(count_of(batch)"
    step = script.cells["step"].text.replace(counting, f"    write_down(model, batch)\n{counting}")
    return script.with_cells(model=model, data=load_datasets, step=step)


def on_slow_disk(script, seconds):
    """The script on a disk that takes so long before a checkpoint is marked as whole."""
    checkpoints = script.cells["checkpoints"].text.replace("def commit(", "def write_mark(")
    return script.with_cells(checkpoints=checkpoints + SLOW.format(seconds=seconds))


options = {"global_batch_size": 8, "precision": "fp64", "steps": 14, "deterministic": True, "env": env}
KILLED, SAVED = 8, 4  # the rank is killed while step 8 is being saved; step 4 was
script = with_notes("fsdp")

# %% [markdown]
# ## Predict: bytes
#
# A checkpoint that training can resume from holds three numbers per parameter: the weight and AdamW's two moments. In
# float32 that is 12 P bytes, in float64 24 P. Gradients are not in it. AdamW also counts the steps of each tensor in 4
# bytes. In shards, each rank writes what it holds: FSDP cuts a tensor's rows into N parts. The guide (001, line 158)
# says that this "avoids gathering the entire model to rank 0", and is right.

# %%
defined = {}
exec(script.cells["model"].text, defined)  # the script's model, here as well, to count
model = defined["Model"]().double()
sizes = [p.nbytes for p in model.parameters()]
P, T = sum(p.numel() for p in model.parameters()), len(sizes)
whole = 3 * 8 * P + 4 * T
parts = [[3 * part.nbytes for part in p.chunk(N)] for p in model.parameters()]
held = [sum(part[rank] for part in parts if rank < len(part)) for rank in ranks]
held[0] += 4 * T  # what all ranks have alike, the first one writes
claims.predict("in shards: bytes of tensors in all files", whole, "B")
for rank in ranks:
    claims.predict(f"in shards: bytes of tensors that rank {rank} writes", held[rank], "B")
AVOIDS = {"article": "001, line 158: sharded avoids gathering on rank 0", "said": 1 / N}
claims.predict("in shards: most that one rank writes, of all", max(held) / whole, "%", within=0.001, **AVOIDS)
claims.predict("in shards: bytes beyond tensors, for each part", 4096, "B", how="at most")
claims.predict("in one file: bytes of tensors", whole, "B")
claims.predict("in one file: bytes beyond tensors, for each tensor", 1024, "B", how="at most")
print(f"{P:,} parameters in {T} tensors: 24 P + 4 T = {whole:,} bytes; by rank {', '.join(f'{h:,}' for h in held)}")

# %% [markdown]
# ## Predict: what is resumed
#
# A checkpoint must hold more than the guide's file, which has `model` and `optimizer` (001, lines 144-147): also the
# step, from which follow the epoch and the place in it, and each rank's random state. Then a resumed run is the same
# run.

# %%
special = "lines of the checkpoints cell that name FSDP"
same = "step 4's weights in four places: checksums"
flipped = "a bit of step 14 flipped: step that is loaded"
went_on = "resumed: loss off by, relative"
resharded = "resumed on one rank: loss off by, relative"
claims.predict(special, 0, article="001, line 44: FSDP requires special handling, DDP does not")
claims.predict("after the kill: folders of checkpoints", 2)
claims.predict("after the kill: that are marked as whole", 1)
claims.predict("resumed after step", SAVED)
claims.predict(went_on, 1e-12, how="at most")
claims.predict(resharded, 1e-9, how="at most")
claims.predict("samples of the first epoch trained on once", SAMPLES)
claims.predict(same, 1)
claims.predict("synchronous: steps started during a save", 0)
claims.predict("asynchronous: steps started during a save", 1, how="at least")
claims.predict(flipped, 12)
display(claims)

# %% [markdown]
# ## Undisturbed
#
# It saves every four steps, asynchronously: it copies what is to be saved, and a thread writes while training
# continues.

# %%
undisturbed = labkit.launch(
    on_slow_disk(script, disk_seconds), nproc_per_node=N, save_every=4, async_save=True, name="undisturbed", **options
)
undisturbed.wait()

# %% [markdown]
# ## Killed
#
# Now the disk hangs at step 8. As soon as all files of that checkpoint are there, the notebook looks up the process of
# rank 0, which is about to mark it, and kills it. SIGKILL cannot be caught: it is what the system does when memory runs
# out. (The third article, 003, line 225, counts "Fault Tolerance" among DDP's advantages: "Easy to checkpoint and
# resume". Easy it is, but it is the checkpoint that tolerates. One dead rank ends the run of all, under DDP as under
# FSDP.)

# %%
hangs = on_slow_disk(script, f"60 if step == {KILLED} else 0")
killed = labkit.launch(hangs, nproc_per_node=N, save_every=4, name="killed", wait=False, **options)
checkpoints = killed.path / "checkpoints"
while not (checkpoints / f"step-{KILLED}.tmp" / ".metadata").exists():
    assert not killed.status().is_final, "it ended before it was killed"
    time.sleep(0.05)
with (killed.path / "ranks" / "0" / "metrics.jsonl").open() as records:
    process = json.loads(records.readline())["pid"]
kill(process, SIGKILL)
try:
    killed.wait()
except labkit.RankFailedError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# What it left. The mark is written last, then the folder loses its `.tmp`, in one rename. All files of step 8 are there
# and may well be whole, but nothing says so. (The guide's `save_fsdp_checkpoint(…, path, …)` knows no mark: who gives
# the same path again and is killed half way has neither the old checkpoint nor the new one.)

# %%
folders = sorted(path for path in checkpoints.iterdir() if path.is_dir())
marked = [path for path in folders if path.suffix != ".tmp" and (path / "COMMIT.json").exists()]
claims.measure("after the kill: folders of checkpoints", len(folders), run=killed)
claims.measure("after the kill: that are marked as whole", len(marked), run=killed)
for_one_rank = shutil.copytree(checkpoints, killed.path / "copy")  # before training resumes in it
rows = [
    {"folder": folder.name, "file": file.name, "bytes": f"{file.stat().st_size:,}"}
    for folder in folders
    for file in sorted(folder.iterdir())
]
display(pd.DataFrame(rows).set_index(["folder", "file"]))

# %% [markdown]
# ## Resumed, twice
#
# The same script resumes in the same folder, now saving synchronously. Then `single` resumes from the copy: one rank,
# no FSDP, and everything in one file in the end.

# %%
again = labkit.launch(
    on_slow_disk(script, disk_seconds),
    nproc_per_node=N,
    save_every=4,
    checkpoint_dir=checkpoints,
    name="resumed",
    **options,
)
again.wait()

# %%
alone = labkit.launch(
    with_notes("single"),
    nproc_per_node=1,
    checkpoint_dir=for_one_rank,
    full_checkpoints=True,
    name="on-one-rank",
    **options,
)
alone.wait()

# %% [markdown]
# ## Is it the same training?


# %%
def notes(run, rank=0):
    """What a rank wrote down: for every step, and for every checkpoint."""
    return [json.loads(line) for line in run.logs(rank=rank).splitlines() if line.startswith("{")]


def steps_of(run, rank=0):
    return [note for note in notes(run, rank) if "samples" in note]


curves = {run: run.losses() for run in (undisturbed, killed, again, alone)}
reference = curves[undisturbed]
claims.measure("resumed after step", curves[again].index.min() - 1, run=again)
assert list(curves[again].index) == list(curves[alone].index) == list(range(SAVED + 1, 15))
for name, run in ((went_on, again), (resharded, alone)):
    difference = ((curves[run] - reference).abs() / reference).max()
    claims.measure(name, difference, run=run)

RING = {"color": "#e5534b", "size": 13, "symbol": "circle-open", "line": {"width": 2}}
figure = go.Figure()
for run, name, look in (
    (undisturbed, "undisturbed, FSDP", {"mode": "lines", "line": {"width": 7, "color": "#c8d6e5"}}),
    (killed, f"killed while step {KILLED} was saved", {"mode": "markers", "marker": RING}),
    (again, f"resumed from step {SAVED}", {"mode": "lines", "line": {"color": "#2da44e"}}),
    (alone, "its shards on one rank", {"mode": "markers", "marker": {"color": "#1f2328", "size": 5}}),
):
    figure.add_scatter(x=list(curves[run].index), y=list(curves[run]), name=name, **look)
figure.update_layout(height=330, margin={"t": 30, "b": 40}, xaxis_title="step", yaxis_title="loss", template="none")
display(figure)

# %% [markdown]
# Which samples? The killed run's first four steps count, and those of the resumed run. What the killed run did in steps
# 5 to 8 is lost: that is the price of a crash, at most `save_every` steps.

# %%
epoch = SAMPLES // options["global_batch_size"]
counted = [
    steps_of(run, rank)[index]
    for rank in ranks
    for run, indices in ((killed, range(SAVED)), (again, range(epoch - SAVED)))
    for index in indices
]
seen = Counter(number for note in counted for number in note["samples"])
once = sum(times == 1 for times in seen.values())
often = sum(times > 1 for times in seen.values())
claims.measure("samples of the first epoch trained on once", once, run=again)
print(f"{once} of {SAMPLES} samples once, {often} more often, {SAMPLES - len(seen)} never")

# %% [markdown]
# ## The same weights, however many ranks
#
# A checkpoint in shards does not depend on FSDP. A few lines of plain torch read it without any ranks: `dcp.load` fills
# the tensors it is given, wherever their parts lie. That is why one `checkpoints` cell serves every strategy: it is the
# same in the `ddp` and the `fsdp` script, and no line of it names FSDP.

# %%
import warnings

import torch.distributed.checkpoint as dcp

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is the intent
weights = model.state_dict()
dcp.load({"model": weights}, checkpoint_id=for_one_rank / f"step-{SAVED}")
found = {
    f"in memory of {N} ranks, before it was killed": steps_of(killed)[SAVED]["weights"],
    f"loaded by {N} ranks, FSDP": steps_of(again)[0]["weights"],
    "loaded by one rank": steps_of(alone)[0]["weights"],
    "read here": checksum(weights),
}
assert len({note["weights"] for note in steps_of(killed)}) == KILLED, "weights change with every step"
claims.measure(same, len({*found.values()}), run=alone)
pd.Series(found, name="checksum").to_frame()

# %%
cells = [Script.load(name, "checkpoints").cells["checkpoints"].text.strip() for name in ("ddp", "fsdp")]
assert cells[0] == cells[1]
lines = cells[0].splitlines()
named = claims.measure(special, sum(bool(re.search("fsdp|fully_?shard", line, re.IGNORECASE)) for line in lines))
print(f"{len(lines)} lines save and load under any strategy; {named} name FSDP")

# %% [markdown]
# ## Bytes
#
# `.metadata` says which part of which tensor is where in which file. torch packs each part on its own; that costs some
# bytes. The single file is there for `torch.load`.

# %%
from torch.distributed.checkpoint import FileSystemReader


def bytes_of_files(path):
    """For each file of a sharded checkpoint, how many bytes of tensors are in it; and the number of their parts."""
    metadata, sizes = FileSystemReader(path).read_metadata(), Counter()
    for where, stored in metadata.storage_data.items():
        tensor = metadata.state_dict_metadata[where.fqn]
        part = next(chunk for chunk in tensor.chunks if chunk.offsets == where.offset)
        sizes[stored.relative_path] += part.sizes.numel() * tensor.properties.dtype.itemsize
    return sizes, len(metadata.storage_data)


def tensors_in(value):
    return [value] if torch.is_tensor(value) else [t for part in value.values() for t in tensors_in(part)]


last = undisturbed.path / "checkpoints" / "step-14"
written, number = bytes_of_files(last)
beyond = sum((last / name).stat().st_size for name in written) - written.total()
claims.measure("in shards: bytes of tensors in all files", written.total(), run=undisturbed)
for rank in ranks:
    by_rank = written[f"__{rank}_0.distcp"]
    claims.measure(f"in shards: bytes of tensors that rank {rank} writes", by_rank, run=undisturbed)
most = max(written.values()) / written.total()
claims.measure("in shards: most that one rank writes, of all", most, run=undisturbed)
claims.measure("in shards: bytes beyond tensors, for each part", beyond / number, run=undisturbed)

one_file = for_one_rank / "step-14" / "full.pt"
tensors = tensors_in(torch.load(one_file, weights_only=True))
together = sum(tensor.nbytes for tensor in tensors)
claims.measure("in one file: bytes of tensors", together, run=alone)
beyond = (one_file.stat().st_size - together) / len(tensors)
claims.measure("in one file: bytes beyond tensors, for each tensor", beyond, run=alone)
print(f"{', '.join(f'{name} {size:,}' for name, size in sorted(written.items()))}; in one file {together:,}")

# %% [markdown]
# ## How long training stood still
#
# Each blue line is the start of a step. A synchronous save costs all of the disk's time; an asynchronous one costs a
# copy, and waits when the one before it is not finished. Seconds depend on the machine and are only shown; what is
# claimed is that no step started during a synchronous save and some did during an asynchronous one.


# %%
def saves_of(run):
    """(step, begin, end) of every checkpoint, from its files to its mark."""
    begun = {note["writing"]: note["time"] for note in notes(run) if "writing" in note}
    return [(n["committed"], begun[n["committed"]], n["time"]) for n in notes(run) if "committed" in n]


figure = go.Figure()
for name, run in (("synchronous", again), ("asynchronous", undisturbed)):
    begins = [note["time"] for note in steps_of(run)]
    during = sum(begin < at < end for _, begin, end in saves_of(run) for at in begins)
    claims.measure(f"{name}: steps started during a save", during, run=run)
    usual = median(after - before for before, after in zip(begins, begins[1:], strict=False))
    first = 15 - len(begins)
    after_save = [step - first for step, *_ in saves_of(run) if step < 14]
    still = sum(begins[index + 1] - begins[index] - usual for index in after_save) / len(after_save)
    print(f"{name}: training stood still for {still:.2f} s at a save; a step takes {usual:.2f} s")
    for step, begin, end in saves_of(run):
        figure.add_bar(
            y=[name], x=[end - begin], base=begin - begins[0], orientation="h", width=0.5, marker_color="#f2c14e",
            text=f"step {step}", showlegend=False,
        )  # fmt: skip
    figure.add_scatter(
        x=[at - begins[0] for at in begins], y=[name] * len(begins), mode="markers", showlegend=False,
        marker={"symbol": "line-ns-open", "size": 30, "color": "#2f81f7"},
    )  # fmt: skip
figure.update_layout(
    height=230, margin={"t": 50, "b": 40}, barmode="overlay", template="none",
    title="blue: a step begins; yellow: a checkpoint is written", xaxis_title="seconds",
)  # fmt: skip
display(figure)

# %% [markdown]
# ## What the guide's code does
#
# Its loading code (001, lines 154-156) passes the saved state first, then the model and the optimizer. That was the
# order of torch 2.0, and for a year longer of the example in torch's own documentation (pytorch's issues 105727 and
# 123952). What does torch expect now? And what happens to a damaged file? The mark holds a checksum of every file: the
# script's own function, called here, skips a checkpoint in which one bit has changed.

# %%
from torch.distributed.fsdp import FullyShardedDataParallel

place = "optim_state_dict_to_load: place of the saved state"
claims.predict(place, 3, article="001, line 155: the first", said=1)
arguments = list(inspect.signature(FullyShardedDataParallel.optim_state_dict_to_load).parameters)
claims.measure(place, 1 + arguments.index("optim_state_dict"))

copy = shutil.copytree(checkpoints, killed.path / "damaged")
damaged = bytearray((copy / "step-14" / "__0_0.distcp").read_bytes())
damaged[len(damaged) // 2] ^= 1
(copy / "step-14" / "__0_0.distcp").write_bytes(damaged)
functions = {}
exec(script.cells["checkpoints"].text, functions)
loaded = functions["newest_whole"](copy)
claims.measure(flipped, int(loaded.name.removeprefix("step-")))
print(f"optim_state_dict_to_load({', '.join(arguments[:3])}); of what is left, {loaded.name} is the newest whole one")

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - Let labkit restart it by itself: `retries=1` in the launch of the killed run. It resumes from step 4 while you
#   watch, and waits a minute for the disk at step 8.
# - Resume as from the guide's file, without the place in the epoch. In the definition of `script`, `with_notes("fsdp")`
#   becomes `with_notes("fsdp").with_cells(main=Script.load("fsdp").cells["main"].text.replace("divmod(step,
#   per_epoch)", "(step // per_epoch, 0)"))`. Only the resumed run is changed by it. Which claims notice?
# - Put `F.dropout(x, 0.1, self.training)` into the model. The curve still continues exactly on N ranks, but not on one.
#   Why?
# - Change a number in `step-4/state.json` of the copy by hand: from which step does the next run resume?
# - Rename `step-8.tmp` to `step-8` before the run is resumed: is it taken? What is said when step 8 is to be saved?
