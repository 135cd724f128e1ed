"""What a busy expert costs: the step's time beside the formula, with experts that only sleep, so cores do not matter.

    python benchmarks/busiest_expert.py

A share of the tokens chooses expert 0, the others choose evenly. All ranks wait for the one with most tokens, so a
step's experts take N times its share of what they take if all N ranks get the same.
"""

from __future__ import annotations

import os
import tempfile

from labkit_labs.labs.experts import EXPERTS, sleeping_experts

import labkit

RANKS = 2


def seconds(share: float) -> tuple[float, float]:
    """(a step's median time, the busiest expert's share)."""
    run = labkit.launch(
        sleeping_experts(share), nproc_per_node=RANKS, steps=6, global_batch_size=4, top_k=1, experts=EXPERTS
    )
    metrics = run.metrics()
    return metrics["step_seconds"].dropna().median(), metrics["busiest_expert"].dropna().iloc[-1]


def main() -> None:
    with tempfile.TemporaryDirectory() as runs:
        os.environ["LABKIT_RUNS"] = runs
        rows = [(share, *seconds(share)) for share in (0.0, 0.5, 1.0)]
    print("to expert 0   busiest expert   step   ratio   formula")
    for share, step, busiest in rows:
        most = share + (1 - share) / RANKS  # of the tokens, on the rank of expert 0
        print(f"{share:11.0%} {busiest:16.0%} {step:6.2f} s {step / rows[0][1]:6.2f} {RANKS * most:9.2f}")


if __name__ == "__main__":
    main()
