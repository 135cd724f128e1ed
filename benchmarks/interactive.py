"""Measures interactive ranks: python benchmarks/interactive.py [--ranks 2]

Prints the time of a cell of `1 + 1` from the request to the last rank's answer, and the share of a core that the run's
processes take while they wait.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import time
from statistics import median

import psutil

import labkit

CELLS, SECONDS = 200, 20.0
SETTLED_SECONDS = 15.0  # after the last cell, ranks look less often


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    count = parser.parse_args().ranks
    with tempfile.TemporaryDirectory() as folder:
        ranks = labkit.ranks(count, runs_dir=folder)
        took = []
        for _ in range(CELLS):
            began = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()):
                ranks.exec("1 + 1")
            took.append(time.perf_counter() - began)
        print(f"{CELLS} cells on {count} ranks: median {1e3 * median(took):.1f} ms, longest {1e3 * max(took):.1f} ms")
        time.sleep(SETTLED_SECONDS)
        processes = [
            each
            for each in psutil.process_iter(["environ"])
            if (each.info["environ"] or {}).get("LABKIT_RUN") == ranks.id
        ]
        before = [sum(each.cpu_times()[:2]) for each in processes]
        time.sleep(SECONDS)
        shares = [(sum(each.cpu_times()[:2]) - was) / SECONDS for each, was in zip(processes, before, strict=True)]
        named = zip((each.environ().get("RANK", "supervisor, torchrun") for each in processes), shares, strict=True)
        for name, share in named:
            print(f"waiting, {f'rank {name}' if name.isdigit() else name}: {share:.2%} of a core")
        print(f"load: {os.getloadavg()[0]:.1f}")
        ranks.stop()


if __name__ == "__main__":
    main()
