"""How often `labkit compare --fail-if "step_time > 5%"` closes for a script and itself, and for one that is 10% slower:
python benchmarks/gate.py [PAIRS]. Two ranks per run; about half a minute for each of the 42 pairs."""

import contextlib
import io
import sys
import tempfile
from collections import Counter
from pathlib import Path

import labkit

TRAIN = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(220):
    time.sleep(0.015 + float(sys.argv[1]))  # as for data
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""
SLOWER = 0.0018  # seconds of a step of 17 to 18 ms
WORDS = {True: "open", False: "closed", None: "cannot be told"}


def main(pairs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(TRAIN)
        runs: dict[str, list[labkit.Run]] = {"old": [], "new": [], "slower": []}
        for _ in range(pairs):
            for name, each in runs.items():
                with contextlib.redirect_stdout(io.StringIO()):
                    seconds = SLOWER if name == "slower" else 0.0
                    run = labkit.launch(script, nproc_per_node=2, args=[seconds], name=name, runs_dir=folder)
                each.append(run)
        for name in ("new", "slower"):
            for size in (1, 3):
                groups = [slice(i, i + size) for i in range(0, pairs - size + 1, size)]
                gates = [labkit.compare(runs[name][g], base=runs["old"][g]).gate("step_time > 5%") for g in groups]
                print(f"old and {name}, {size} and {size} runs: {dict(Counter(WORDS[gate.passed] for gate in gates))}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 42)
