"""What several unit tests start from: an empty run folder and a way to fill a rank's metrics.jsonl."""

import json

import pytest
from hypothesis import settings

from labkit.record import RunFolder

# A busy machine is slow now and then; no test here is about time.
settings.register_profile("unit", deadline=None)
settings.load_profile("unit")


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "20260102T030405Z-demo-0a1b")
    run.ranks.mkdir(parents=True)
    return run


@pytest.fixture
def write_metrics(folder):
    """`write_metrics(rank, *records)`: dictionaries as JSON lines, bytes as they are."""

    def write(rank, *records):
        folder.rank(rank).mkdir(exist_ok=True)
        lines = (r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in records)
        with folder.metrics(rank).open("ab") as file:
            file.writelines(lines)

    return write
