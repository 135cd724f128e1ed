"""What it costs to judge many ranks while they train: the CPU time of one look of `labkit.witness.Judge`.

python benchmarks/witness_ranks.py                  1,024 ranks that agree, 50 and 500 new steps of each
python benchmarks/witness_ranks.py --ranks 64

The share is of one core, at the period at which a supervisor looks. "differing": the ranks fetch different numbers of
batches, so that their steps are not equal as bytes; "checked": each rank has also written a check of its parameters,
as it does eleven times in the first 500 steps, and then at every 1000th.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from labkit.record import RunFolder
from labkit.ring import REDUCED, RingWriter
from labkit.witness import Judge

LOOKS = 6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1024)
    ranks = parser.parse_args().ranks
    for steps, kind in ((50, "equal"), (500, "equal"), (50, "differing"), (50, "checked")):
        with tempfile.TemporaryDirectory() as folder:
            seconds, period = look(RunFolder(Path(folder)), ranks, steps, kind)
        print(f"{ranks} ranks, {steps:3} {kind} steps: {seconds * 1000:6.1f} ms, {seconds / period:.2%} of a core")


def look(attempt: RunFolder, ranks: int, steps: int, kind: str) -> tuple[float, float]:
    """The median CPU seconds of a look after the first, and the seconds between two looks."""
    rings = []
    place = {"t": 0.0, "step": 0, "number": 0, "line": 3}
    group = place | {"n": 0, "ranks": [*range(ranks)]}
    declared = [group | {"k": "ddp", "parameters": 4}]
    declared += [group | {"k": "declared", "set": 0, "what": "ddp", "of": "1f", "device": "cpu", "called": "model"}]
    check = place | {"k": "check", "set": 0, "opt": 0, "settings": [{"lr": 0.1}], "sum": "1f", "gradients": ""}
    check |= {"writes": 8, "scalings": 0, "passes": [1, 1, True], "local": False}
    for rank in range(ranks):
        attempt.ring(rank).parent.mkdir(parents=True)
        rings.append(RingWriter(attempt.ring(rank)))
        attempt.witnessed(rank).write_text("".join(f"{json.dumps(line)}\n" for line in declared))
    judge, times = Judge(attempt, range(ranks), "train.py"), []
    for first in range(1, LOOKS * steps, steps):
        for rank, ring in enumerate(rings):
            for number in range(first, first + steps):
                fetched = 2 if kind == "differing" and (31 * number + 17 * rank) % 7 == 0 else 1
                ring.after_step((fetched, 1, 3 * number, 0, REDUCED, 0), (number, 21, 0.5, 3 * number - 1))
            if kind == "checked":
                with attempt.witnessed(rank).open("a") as file:
                    at = {"at": first, "calls": 3 * first, "forwards": first}
                    file.write(json.dumps(check | at) + "\n")
        started = time.process_time()
        assert not judge.look()
        times.append(time.process_time() - started)
    return median(times[1:]), judge.every


if __name__ == "__main__":
    main()
