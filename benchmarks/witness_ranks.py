"""What it costs to judge many ranks while they train: the CPU time of one look of `labkit.witness.Judge`.

python benchmarks/witness_ranks.py                  1,024 ranks that agree, 50 and 500 new steps of each
python benchmarks/witness_ranks.py --ranks 64

The share is of one core, at the period at which a supervisor looks. "differing": the ranks fetch different numbers of
batches, so that their steps are not equal as bytes.
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
    for steps, differ in ((50, False), (500, False), (50, True)):
        with tempfile.TemporaryDirectory() as folder:
            seconds, period = look(RunFolder(Path(folder)), ranks, steps, differ)
        kind = "differing" if differ else "equal"
        print(f"{ranks} ranks, {steps:3} {kind} steps: {seconds * 1000:6.1f} ms, {seconds / period:.2%} of a core")


def look(attempt: RunFolder, ranks: int, steps: int, differ: bool) -> tuple[float, float]:
    """The median CPU seconds of a look after the first, and the seconds between two looks."""
    rings = []
    for rank in range(ranks):
        attempt.ring(rank).parent.mkdir(parents=True)
        rings.append(RingWriter(attempt.ring(rank)))
        declared = {"k": "ddp", "step": 0, "number": 0, "line": 3, "n": 0, "ranks": [*range(ranks)], "parameters": 4}
        attempt.witnessed(rank).write_text(json.dumps({"t": 0.0, **declared}) + "\n")
    judge, times = Judge(attempt, range(ranks), "train.py"), []
    for first in range(1, LOOKS * steps, steps):
        for rank, ring in enumerate(rings):
            for number in range(first, first + steps):
                fetched = 2 if differ and (31 * number + 17 * rank) % 7 == 0 else 1
                ring.after_step((fetched, 1, 3 * number, 0, REDUCED, 0), (number, 21, 0.5, 3 * number - 1))
        started = time.process_time()
        assert not judge.look()
        times.append(time.process_time() - started)
    return median(times[1:]), judge.every


if __name__ == "__main__":
    main()
