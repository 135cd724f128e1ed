"""Trains scripts under labkit and prints what the witness found to be wrong with each.

python benchmarks/witness_corpus.py tests/witness/faulty (or several folders or files)
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import labkit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["LABKIT_UI"] = "text"
    scripts = [
        script for path in arguments.paths for script in (sorted(path.glob("*.py")) if path.is_dir() else [path])
    ]
    with tempfile.TemporaryDirectory() as runs:
        for script in scripts:
            began = time.monotonic()
            run = labkit.launch(script, nproc_per_node=ranks_of(script), wait=False, runs_dir=runs, watchdog=60)
            with suppress(labkit.RankFailedError):
                run.wait(timeout=170)
            state, findings = run.status(), run.findings()
            dropped = [end.dropped for h in run._reader.read_all().ranks.values() if (end := h.end) and end.dropped]
            problems = f", dropped {dropped}" if dropped else ""
            print(f"## {script.stem}: {state.state}, {time.monotonic() - began:.1f} s{problems}", flush=True)
            if state.cause:
                print(f"   cause: {state.cause.sentence[:300]}")
            for finding in findings:
                print(f"   [{finding.kind}{'' if finding.certain else ', note'}] {finding.sentence}", flush=True)
            run.rm()


def ranks_of(script: Path) -> int:
    said = re.search(r"ranks: (\d+)", script.read_text(encoding="utf-8").splitlines()[0])
    return int(said[1]) if said else 2


if __name__ == "__main__":
    sys.exit(main())
