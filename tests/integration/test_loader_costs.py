"""What the workers of a DataLoader cost a training: their start in every epoch, and their memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import labkit
from labkit.record import RunReader
from labkit.view.live.verdict import verdict

EPOCHS = """import time, torch
from torch.utils.data import DataLoader, Dataset

class Files(Dataset):
    index = None
    def __len__(self): return 64
    def __getitem__(self, i):
        if self.index is None:
            time.sleep(START)
            self.index = True
        time.sleep(SAMPLE)
        return torch.randn(16)

model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(Files(), batch_size=8, OPTIONS)
for epoch in range(5):
    for x in loader:
        loss = model(x).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        time.sleep(STEP)
"""


def said_of(tmp_path: Path, text: str, **values: object) -> list[str]:
    for name, value in values.items():
        text = text.replace(name, str(value))
    (tmp_path / "train.py").write_text(text)
    run = labkit.launch(tmp_path / "train.py", nproc_per_node=1, wait=True)
    return verdict(RunReader(run.folder).read_all(), run.status(), 9)


def test_workers_that_every_epoch_starts_again_are_not_called_input_bound(tmp_path: Path) -> None:
    said = said_of(tmp_path, EPOCHS, START=2.0, SAMPLE=0, STEP=0, OPTIONS="num_workers=2")  # on busy cores, too

    start = "the first step of each epoch waits until the DataLoader has started its workers again"
    sentence = start + r": \d\S* s of \S+ s; persistent_workers=True keeps them"
    assert any(re.fullmatch(sentence, each) for each in said), said
    assert not any("input-bound" in sentence for sentence in said)


@pytest.mark.parametrize(
    "options",
    [
        "num_workers=2, persistent_workers=True",  # what is advised
        "num_workers=0",
    ],
)
def test_nothing_is_said_of_workers_that_no_epoch_starts_again(tmp_path: Path, options: str) -> None:
    assert "epoch" not in " ".join(said_of(tmp_path, EPOCHS, START=0.5, SAMPLE=0, STEP=0, OPTIONS=options))


def test_a_first_batch_that_takes_long_to_make_is_not_blamed_on_the_start_of_its_worker(tmp_path: Path) -> None:
    said = said_of(tmp_path, EPOCHS, START=0, SAMPLE=0.05, STEP=0.11, OPTIONS="num_workers=4")

    assert any(sentence.startswith("input-bound: ") for sentence in said), said
    assert "epoch" not in " ".join(said)


ROWS = """import time, torch
from torch.utils.data import DataLoader, Dataset

class Captions(Dataset):
    def __init__(self, n=400_000):
        self.n = n
        self.rows = DATA
    def __len__(self): return self.n
    def __getitem__(self, i):
        return torch.full((16,), float(self.rows[i]["id"] if isinstance(self.rows, list) else self.rows[i]))

model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
loader = DataLoader(Captions(), batch_size=256, shuffle=True, num_workers=4, multiprocessing_context="fork")
for step, x in zip(range(250), loader):
    loss = model(x).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    time.sleep(0.04)  # the workers are looked at about once a second, and shall not have copied everything by then
"""
LIST, TENSOR = '[{"id": i, "text": "caption number %d of a large data set" % i} for i in range(n)]', "torch.arange(n)"
MIB = 1 << 20


def copied(tmp_path: Path, data: str) -> int:
    (tmp_path / "train.py").write_text(ROWS.replace("DATA", data))
    run = labkit.launch(tmp_path / "train.py", nproc_per_node=1, wait=True)
    (host,) = RunReader(run.folder).read_all().hosts.values()
    memory = host.loaders[0]
    assert memory.workers == 4
    assert 10 * MIB < memory.rank < 2048 * MIB
    assert 20 * MIB < memory.workers_pss < 4096 * MIB
    return host.copied


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not say what is shared")
def test_a_list_that_workers_read_is_copied_and_what_is_advised_is_not(tmp_path: Path) -> None:
    assert copied(tmp_path, LIST) > 50 * MIB
    assert copied(tmp_path, TENSOR) < 10 * MIB
