"""Two real runs at a time on the same cores know of each other."""

from __future__ import annotations

import labkit

SCRIPT = """
import time, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(80):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
"""


def test_runs_that_overlap_say_so_and_their_speed_up_is_marked(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    first = labkit.launch(tmp_path / "train.py", nproc_per_node=1, wait=False)
    second = labkit.launch(tmp_path / "train.py", nproc_per_node=1, wait=False)
    for run in (first, second):
        run.wait()

    for run, other in ((first, second), (second, first)):
        (host,) = run._reader.read_all().hosts.values()
        start, end = host.runs[other.id]
        assert 2.0 < end - start <= run.status().seconds
        assert any(
            "it overlapped with run " in sentence for sentence in run.verdict()
        )  # or with a third one for longer
    comparison = labkit.compare([first, second])
    assert comparison.table["speedup_remark"][1].startswith("repeat, overlapped")
    assert str(comparison).count("it overlapped with run ") == 2
