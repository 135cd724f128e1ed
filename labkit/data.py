"""Provides data sets for the labs: from disk if present, otherwise downloaded once and checked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from labkit.arguments import checked
from labkit.errors import LabError

# IDX files and their MD5 sums, from torchvision.
MNIST = {
    "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
}
SOURCES = {"mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/", MNIST)}
FOLDERS = ("data", "/kaggle/input")


@checked()
def fetch(name: str) -> Path:
    """The folder with a dataset's files: `data/` or Kaggle's input if they are there, otherwise a cache into which they
    are downloaded and verified.

    Raises LabError for an unknown name, or if the files are not present and cannot be downloaded.
    """
    if name not in SOURCES:
        raise LabError(f"no dataset named {name!r}; there are: {', '.join(SOURCES)}")
    url, files = SOURCES[name]
    for folder in _folders(files):
        return folder
    import pooch

    cache = pooch.create(path=pooch.os_cache("labkit") / name, base_url=url, registry=files, retry_if_failed=1)
    try:
        paths = [Path(cache.fetch(file)) for file in files]
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a wrong sum is a ValueError
        raise LabError(
            f"{name} could not be downloaded from {url}: {error}\n"
            f"Put its files ({', '.join(files)}, compressed or not) in {Path('data').absolute()} and try again"
        ) from None
    return paths[0].parent


def _folders(files: dict[str, str]) -> Iterator[Path]:
    """Folders below FOLDERS that contain all the files, compressed or not."""
    first, *others = files
    for root in FOLDERS:
        for pattern in (first, first.removesuffix(".gz")):
            for file in sorted(Path(root).rglob(pattern)):
                present = {path.name for path in file.parent.iterdir()}
                if complete(others, present):
                    yield file.parent


def complete(files: Iterable[str], present: Collection[str]) -> bool:
    """Whether all the files are among the names that are present, compressed or not."""
    return all(file in present or file.removesuffix(".gz") in present for file in files)
