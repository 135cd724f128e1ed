"""How long planning a decoder of 70 billion parameters on 1,024 ranks takes, and how much memory.

python benchmarks/large_model.py
"""

from __future__ import annotations

import resource
import time

import labkit
from labkit import Script

SIZES, LARGE = (
    "vocabulary=256, context=128, width=128, heads=4, layers=4",
    "vocabulary=32000, context=2048, width=8192, heads=64, layers=86",
)


def main() -> None:
    fsdp = Script.load("fsdp")
    model = fsdp.cells["model"].text.replace(SIZES, LARGE)
    data = fsdp.cells["data"].text.replace("context=128, limit=2**20", "context=2048, limit=2**25")
    began = time.perf_counter()
    plan = labkit.plan(
        fsdp.with_cells(model=model, data=data),
        nproc_per_node=1024,
        device="H100",
        precision="bf16",
        activation_checkpointing=True,
        global_batch_size=1024,
    )
    seconds = time.perf_counter() - began
    own, largest = (resource.getrusage(who).ru_maxrss << 10 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(plan)
    print(f"\n{plan.facts.elements / 1e9:.1f} billion parameters on {plan.ranks:,} ranks: {seconds:.1f} s")
    print(f"this process {own / 2**20:.0f} MiB, the larger of its two children {largest / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
