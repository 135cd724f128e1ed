"""Packs labkit and the labs' package as wheels, from the installation that runs, and as a dataset for Kaggle."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from labkit.errors import LabError
from labkit.install import install_the_labs, pip_install
from labkit.version import __version__
from labkit.write import script_files

TAG = "py3-none-any"
MADE = (1980, 1, 1, 0, 0, 0)  # a constant, so that the same labkit gives the same bytes


def wheel(package: str = "labkit") -> tuple[str, bytes]:
    """`(file name, content)`; not compressed, because it is compressed as a whole when embedded.

    `package` is labkit or labkit_labs, which have the same version.
    """
    stem = f"{package}-{__version__}"
    files = dict(_package(package)) | dict(_metadata(package, f"{stem}.dist-info"))
    record = f"{stem}.dist-info/RECORD"
    # Without digests, which would be 4 % of a notebook: what is embedded has a checksum as a whole.
    files[record] = "".join(f"{name},,\n" for name in (*files, record)).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, MADE)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return f"{stem}-{TAG}.whl", out.getvalue()


def _package(package: str) -> Iterator[tuple[str, bytes]]:
    folder = _folder(package)
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        # the scripts are added below: in a checkout they are next to the package, otherwise inside it
        if path.is_file() and "__pycache__" not in inside.parts and inside.parts[0] != "scripts":
            yield f"{package}/{inside.as_posix()}", path.read_bytes()
    for name, path in script_files().items() if package == "labkit" else ():
        yield f"labkit/scripts/{name}", path.read_bytes()


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise LabError(
            f"{package} is not installed for {sys.executable}, so it cannot be packed for Kaggle. Install it, "
            f"{install_the_labs()}"
        )
    return Path(spec.origin).parent


def _metadata(package: str, folder: str) -> Iterator[tuple[str, bytes]]:
    try:
        own = distribution(package)
    except PackageNotFoundError:
        raise LabError(
            f"{package} is not installed for {sys.executable}, only imported from {_folder(package).parent}, so it "
            f"cannot be packed for Kaggle. Install it there: {pip_install(str(_folder(package).parent))}"
        ) from None
    headers = (own.read_text("METADATA") or "").partition("\n\n")[0].strip()  # without the README
    yield f"{folder}/METADATA", f"{headers}\n".encode()
    yield f"{folder}/WHEEL", f"Wheel-Version: 1.0\nGenerator: labkit\nRoot-Is-Purelib: true\nTag: {TAG}\n".encode()
    for file in sorted(own.files or ()):
        if file.name in ("entry_points.txt", "LICENSE") and file.parts[0].endswith(".dist-info"):
            yield "/".join([folder, *file.parts[1:]]), Path(str(file.locate())).read_bytes()


DATASET = "labkit-wheel"  # the slug of the dataset


def write_dataset(folder: Path, user: str, packages: Sequence[str]) -> list[Path]:
    """Write a dataset of these packages' wheels, for `kaggle datasets create -p FOLDER`; the wheels' paths.

    Replaces an earlier one. Raises LabError if the folder has another dataset's metadata, or cannot be written.
    """
    if not re.fullmatch(r"[\w-]+", user):
        raise LabError(f"a Kaggle user name has only letters, digits, - and _; got {user!r}")
    described, address = folder / "dataset-metadata.json", f"{user}/{DATASET}"
    metadata = {
        "title": "labkit wheel",
        "id": address,
        "licenses": [{"name": "other"}],
        "description": f"The wheel of labkit {__version__}, under the MIT license, for notebooks without internet.",
    }
    wheels = [wheel(package) for package in packages]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if described.exists() and f'"{address}"' not in described.read_text(encoding="utf-8", errors="replace"):
            raise LabError(f"{folder} has the metadata of another dataset; choose another folder with --into")
        for earlier in folder.glob("labkit*.whl"):
            earlier.unlink()
        for name, content in wheels:
            (folder / name).write_bytes(content)
        described.write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise LabError(f"the dataset cannot be written into {folder}: {error.strerror}") from None
    return [folder / name for name, _ in wheels]
