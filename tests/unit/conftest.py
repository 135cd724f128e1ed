"""What several unit tests start from: an empty run folder, a way to fill a rank's metrics.jsonl, an IPython shell."""

import importlib.util
import json
import sys
from pathlib import Path

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


@pytest.fixture
def write_eight_steps(write_metrics):
    """`write_eight_steps(*more, **fields)`: eight steps of two ranks with these `fields`, then `more` records."""

    def write(*more, **fields):
        step = {"k": "step", "n": 1, "seconds": [0.1] * 3, "samples": 8, "rss": 1e9} | fields
        steps = [step | {"t": float(i), "step": i, "loss": 10.0 - i} for i in range(1, 9)]
        for rank in (0, 1):
            write_metrics(rank, {"k": "meta", "t": 0.0}, *steps, *more)

    return write


@pytest.fixture(scope="session")
def gallery():
    """The module benchmarks/gallery.py, which makes up a run in every state."""
    file = Path(__file__).parents[2] / "benchmarks" / "gallery.py"
    spec = importlib.util.spec_from_file_location("gallery", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """IPython's shell, of which nothing is left afterwards."""
    from IPython.core.interactiveshell import InteractiveShell  # slow to import
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    before = sys.modules["__main__"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        yield InteractiveShell.instance(config=config)
    InteractiveShell.clear_instance()
    for prompt in ("ps1", "ps2", "ps3"):  # IPython sets them, and this process would pass for an interactive one
        vars(sys).pop(prompt, None)
    sys.modules["__main__"] = before
