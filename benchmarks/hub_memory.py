"""Planned and traced memory of models of transformers: a row for each configuration of hub_models.py.

    python benchmarks/hub_memory.py [NAME ...]            (some 15 minutes for all)

Every model is small and trains 3 steps under FSDP on 2 gloo ranks, on texts of about one length, because a plan is for
the longest. Formulas and rehearsal are those of `labkit.plan`; the traced step is the third of a real run.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from hub_models import MODELS, script_of

import labkit
from labkit import LabError, Script
from labkit.planner.layout import layout_of
from labkit.planner.memory.peak import peak
from labkit.planner.model.facts import facts_of
from labkit.planner.model.rehearsal import rehearse

RANKS = 2
LENGTH = 64


def write_texts(folder: Path) -> None:
    for part, count in (("train", 64), ("test", 16)):
        # half of them a little shorter: without padding the real masks would be left out
        texts = [f"{number:0{LENGTH - 4 * (number % 2)}d}" for number in range(count)]
        rows = [{"text": text, "label": n % 2, "source": text, "target": text} for n, text in enumerate(texts)]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def percent(planned: int, measured: int) -> str:
    return f"{100 * (planned / measured - 1):+.1f} %"


def row(task: str, kind: str, own: dict[str, object], folder: Path) -> tuple[list[str], list[float]]:
    own = {name: value for name, value in own.items() if name != "experts_implementation"}  # fp32 has the fast one
    script = Script.parse(script_of("fsdp", task, kind, own), name="fsdp")
    options: dict[str, object] = {"global_batch_size": 16}
    if task != "image_text":  # which draws its pictures
        options["data_dir"] = folder
    with contextlib.redirect_stdout(sys.stderr):
        run = labkit.launch(
            script, nproc_per_node=RANKS, steps=3, trace_memory=True, runs_dir=folder / "runs", wait=True, **options
        )
    traced = run.memory().ranks[0].traced
    assert traced, run
    rehearsed = rehearse(script, RANKS, options, rank=0)
    try:
        formulas = peak(facts_of(script, options, ()), layout_of(script, RANKS, options), 0).bytes
    except LabError as error:
        cells = [str(error).splitlines()[0]]
    else:
        cells = [percent(formulas, traced.bytes)]
    cells = [f"{traced.bytes / 2**20:.2f}", *cells, percent(rehearsed.bytes, traced.bytes)]
    return cells, [abs(rehearsed.bytes / traced.bytes - 1)]


def main() -> None:
    chosen, errors = sys.argv[1:], []
    print("| model | task | measured, MiB | formulas | rehearsed |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_texts(folder)
        for task, kinds in MODELS.items():
            for kind, own in kinds.items():
                if chosen and kind not in chosen:
                    continue
                try:
                    cells, error = row(task, kind, own, folder)
                except LabError as error:
                    print(f"| {kind} | {task} | {str(error).splitlines()[0]} | | |", flush=True)
                    continue
                errors += error
                print(f"| {kind} | {task} | {' | '.join(cells)} |", flush=True)
    worst = max(errors)
    print(f"\nRehearsed: {len(errors)} models, median {100 * median(errors):.2f} %, largest {100 * worst:.2f} %")


if __name__ == "__main__":
    main()
