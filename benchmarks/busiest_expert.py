"""What a busy expert costs: the step's time beside the formula, with experts that only sleep, so cores do not matter.

    python benchmarks/busiest_expert.py

A share of the tokens chooses expert 0, the others choose evenly. All ranks wait for the one with most tokens, so a
step's experts take N times its share of what they take if all N ranks get the same.
"""

from __future__ import annotations

import os
import tempfile

import labkit
from labkit import Script

RANKS, EXPERTS, SECONDS = 2, 8, 5e-4  # per token, in forward and in backward
ROUTES = "        scores, chosen = (scores /"
FORWARD = "        return torch.cat([F.gelu(part"
SLEEP = f"""
class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        time.sleep({SECONDS} * len(rows))
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep({SECONDS} * len(gradient))
        return gradient


class Experts("""


def script(share: float) -> Script:
    """Two small blocks, of which `share` of the tokens choose expert 0."""
    whole = Script.load("expert_parallel", task="mixture")
    text = whole.cells["model"].text
    chosen = f"torch.arange(len(tokens), device=x.device) % {EXPERTS}"
    first = f"torch.arange(len(tokens), device=x.device) < {share} * len(tokens)"
    for before, after in (
        ("import math\n", "import math\nimport time\n"),
        ("class Experts(", SLEEP),
        ("width=128, heads=4, layers=4", "width=16, heads=2, layers=2"),
        (ROUTES, f"        chosen = torch.where({first}, 0, {chosen})[:, None]\n{ROUTES}"),
        (FORWARD, f"        rows = Sleep.apply(rows)\n{FORWARD}"),
    ):
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return whole.with_cells(model=text)


def seconds(share: float) -> tuple[float, float]:
    """(a step's median time, the busiest expert's share)."""
    run = labkit.launch(script(share), nproc_per_node=RANKS, steps=6, global_batch_size=4, top_k=1, experts=EXPERTS)
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
