"""Data sets for the labs: found on disk first, otherwise fetched once and checked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from labkit.errors import LabError

__all__ = ["SOURCES", "complete", "fetch"]

# IDX files and their MD5 sums as torchvision lists them.
MNIST = {
    "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
}
SOURCES = {"mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/", MNIST)}
FOLDERS = ("data", "/kaggle/input")


def fetch(name: str) -> Path:
    """The folder that holds a data set's files: `data/` or Kaggle's input if they are there, otherwise a cache
    they are downloaded into, each checked against its sum.

    Raises LabError for an unknown name, or when the files are neither here nor to be had.
    """
    if name not in SOURCES:
        raise LabError(f"no data set named {name!r}; there are: {', '.join(SOURCES)}")
    url, files = SOURCES[name]
    for folder in _folders(files):
        return folder
    import pooch

    cache = pooch.create(path=pooch.os_cache("labkit") / name, base_url=url, registry=files, retry_if_failed=1)
    try:
        paths = [Path(cache.fetch(file)) for file in files]
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a wrong sum is a ValueError
        raise LabError(
            f"{name} could not be fetched from {url}: {error}\n"
            f"Put its files ({', '.join(files)}, packed or unpacked) into {Path('data').absolute()} and try again"
        ) from None
    return paths[0].parent


def _folders(files: dict[str, str]) -> Iterator[Path]:
    """Folders below the usual places that hold all the files, packed or not."""
    first, *others = files
    for root in FOLDERS:
        for pattern in (first, first.removesuffix(".gz")):
            for found in sorted(Path(root).rglob(pattern)):
                here = {path.name for path in found.parent.iterdir()}
                if complete(others, here):
                    yield found.parent


def complete(files: Iterable[str], here: Collection[str]) -> bool:
    """Whether all the files are among these names, packed or not."""
    return all(file in here or file.removesuffix(".gz") in here for file in files)
