"""Kills a run while it saves, and shows what the killed run left and what its files hold."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from signal import SIGKILL
from statistics import median
from typing import Any

from labkit.errors import LabError, RankFailedError
from labkit.launching import launch
from labkit.run import Run
from labkit.write import Script
from labkit_labs.draw.charts import bars
from labkit_labs.draw.picture import Picture
from labkit_labs.lesson import Lesson, printed_lists

__all__ = [
    "apart",
    "copied",
    "copy_with_a_bit_flipped",
    "killed_while_saving",
    "lost",
    "not_once",
    "on_slow_disk",
    "samples_of",
    "still_at",
    "tensor_bytes",
    "trained_again",
]

SLOW = """

def commit(beside, step):
    time.sleep({seconds})  # all files are written, but not the mark that says so
    write_mark(beside, step)
"""


def on_slow_disk(script: Script, seconds: float | str) -> Script:
    """The script on a disk that needs `seconds`, which may be an expression in `step`, before it marks a checkpoint as
    complete."""
    renamed = script.cells["checkpoints"].text.replace("def commit(", "def write_mark(")
    return script.with_cells(checkpoints=renamed + SLOW.format(seconds=seconds))


def killed_while_saving(lab: Lesson, script: Script, step: int, **options: Any) -> Run:
    """Launch the script on a disk that hangs when all files of this step's checkpoint are written, and kill rank 0
    there with SIGKILL. Prints what labkit says about it. Raises LabError when the run ends earlier."""
    hanging = on_slow_disk(script, f"60 if step == {step} else 0")
    run = launch(hanging, name="killed", nproc_per_node=lab.ranks, env=lab.env, wait=False, **options)
    while not (run.path / "checkpoints" / f"step-{step}.tmp" / ".metadata").exists():
        if run.status().is_final:
            raise LabError(f"{run.id} ended before it could be killed")
        time.sleep(0.05)
    with (run.path / "ranks" / "0" / "metrics.jsonl").open() as records:
        os.kill(json.loads(records.readline())["pid"], SIGKILL)
    try:
        run.wait()
    except RankFailedError as error:
        print(str(error).splitlines()[0])
    return run


def samples_of(run: Run) -> list[list[int]]:
    """By step, the numbers of the samples that all ranks trained on. The model prints (seconds, numbers)."""
    return [sum((numbers for _, numbers in ranks), []) for ranks in zip(*printed_lists(run), strict=False)]


def trained_again(run: Run, resumed: Run) -> int:
    """How many steps of a run were trained again by the one that resumed it."""
    return len(samples_of(run)) + 1 - int(resumed.losses().index[0])


def not_once(samples: int, *parts: tuple[Run, int]) -> int:
    """How many of `samples` were not trained on exactly once. `parts` are pairs of a run and how many of its first
    steps count."""
    steps = [numbers for run, count in parts for numbers in samples_of(run)[:count]]
    seen = Counter(number for numbers in steps for number in numbers)
    return sum(seen[number] != 1 for number in range(samples))


def apart(run: Run, reference: Run) -> float:
    """The largest relative difference of a loss; NaN when they share no step."""
    return float((run.losses() / reference.losses() - 1).abs().max())


def still_at(run: Run, every: int) -> float:
    """How many seconds longer rank 0 needs for a step with a checkpoint, which is each `every`-th, than for another
    one: the difference of their medians."""
    times: list[float] = [at for at, _ in printed_lists(run)[0]]
    first = int(run.losses().index[0])
    gaps = {step: after - before for step, (before, after) in enumerate(pairwise(times), first)}
    usual = median(gap for step, gap in gaps.items() if step % every)
    return median(gap for step, gap in gaps.items() if step % every == 0) - usual


def copied(folder: Path, why: str) -> Path:
    """A copy beside the folder, `<folder> <why>`."""
    return Path(shutil.copytree(folder, folder.with_name(f"{folder.name} {why}")))


def copy_with_a_bit_flipped(folder: Path, file: str) -> Path:
    """A copy of a folder of checkpoints with one bit flipped in the middle of a file."""
    copy = copied(folder, "damaged")
    content = bytearray((copy / file).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / file).write_bytes(content)
    return copy


def tensor_bytes(checkpoint: Path) -> Counter[int]:
    """By rank, the bytes of tensors that it wrote to a sharded checkpoint, as its `.metadata` has them."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata, sizes = FileSystemReader(checkpoint).read_metadata(), Counter[int]()
    for where, stored in metadata.storage_data.items():
        tensor = metadata.state_dict_metadata[where.fqn]
        assert isinstance(tensor, TensorStorageMetadata)
        part = next(chunk for chunk in tensor.chunks if chunk.offsets == where.offset)
        rank = int(stored.relative_path.split("_")[2])  # of __1_0.distcp
        sizes[rank] += part.sizes.numel() * tensor.properties.dtype.itemsize
    return sizes


def lost(save_every_minutes: float, hours_between_failures: float, save_seconds: float) -> Picture:
    """The share of the training time that is lost, by cause: saving, and steps that are trained again, half an interval
    for each failure (Young 1974)."""
    interval, apart = 60 * save_every_minutes, 3600 * hours_between_failures
    parts = {"saving": save_seconds / interval, "trained again": interval / 2 / apart}
    best = (2 * save_seconds * apart) ** 0.5 / 60
    title = f"share of the time that is lost; least with a save every {best:.0f} minutes"
    return bars(predicted={"lost": parts}, unit="%", title=title, limit=0.2)
