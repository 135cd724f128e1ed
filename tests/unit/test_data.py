"""MNIST from disk, and its download exercised against a local stand-in of the server (there is no internet here)."""

from __future__ import annotations

import gzip
import hashlib
import re
import textwrap
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import nbformat
import numpy as np
import pytest

import labkit
from labkit import LabError, data

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "01_quickstart.ipynb"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def files(tmp_path):
    """Made-up IDX files, eight images for training and four for testing."""
    folder = tmp_path / "server"
    folder.mkdir()
    for part, count in (("train", 8), ("t10k", 4)):
        images = np.arange(count * 28 * 28, dtype=np.uint32).astype(np.uint8).tobytes()
        shape = np.array([count, 28, 28], ">i4").tobytes()
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x03" + shape + images))
        labels = bytes(i % 10 for i in range(count))
        count_bytes = np.array([count], ">i4").tobytes()
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x01" + count_bytes + labels))
    return folder


@pytest.fixture
def away(tmp_path, monkeypatch):
    """A working folder and a cache of its own, so that nothing is found by accident."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("packed", [True, False])
def test_files_on_disk_are_found_packed_or_not(files, away, packed):
    place = away / "data" / "some" / "where"
    place.mkdir(parents=True)
    for file in files.iterdir():
        content = file.read_bytes()
        (place / (file.name if packed else file.stem)).write_bytes(content if packed else gzip.decompress(content))
    assert labkit.fetch("mnist").resolve() == place.resolve()


def test_an_incomplete_folder_does_not_count(files, away, monkeypatch):
    (away / "data").mkdir()
    (away / "data" / "train-images-idx3-ubyte.gz").write_bytes(b"")
    monkeypatch.setitem(data.SOURCES, "mnist", ("http://127.0.0.1:9/", data.MNIST))
    with pytest.raises(LabError, match="could not be downloaded"):
        labkit.fetch("mnist")


def served(folder):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_a_download_from_a_stand_in_is_checked_and_kept(files, away, monkeypatch):
    sums = {file.name: f"md5:{hashlib.md5(file.read_bytes()).hexdigest()}" for file in files.iterdir()}
    server = served(files)
    monkeypatch.setitem(data.SOURCES, "mnist", (f"http://127.0.0.1:{server.server_port}/", sums))
    found = labkit.fetch("mnist")
    server.shutdown()
    server.server_close()
    assert sorted(file.name for file in found.iterdir()) == sorted(sums)
    assert labkit.fetch("mnist") == found


def test_a_download_with_a_wrong_sum_is_refused(files, away, monkeypatch):
    server = served(files)
    monkeypatch.setitem(data.SOURCES, "mnist", (f"http://127.0.0.1:{server.server_port}/", data.MNIST))
    with pytest.raises(LabError, match="could not be downloaded.*\n.*Put its files"):
        labkit.fetch("mnist")
    server.shutdown()
    server.server_close()


def test_an_unknown_data_set_is_named():
    with pytest.raises(LabError, match="no dataset named 'minst'; there are: mnist"):
        labkit.fetch("minst")


def test_the_data_cell_that_the_quickstart_offers_reads_idx_files(files):
    text = "\n".join(cell.source for cell in nbformat.read(NOTEBOOK, 4).cells)
    offered = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    namespace: dict = {}
    exec(textwrap.dedent(offered[0]), namespace)
    train, test = namespace["load_datasets"](str(files))
    assert (len(train), len(test)) == (8, 4)
    assert train.tensors[0].shape == (8, 1, 28, 28)
    assert train.tensors[0].max() <= 1
    assert train.tensors[1].tolist() == list(range(8))
