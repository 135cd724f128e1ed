"""Makes the two files of a Kaggle kernel from a notebook, which bring labkit as a wheel. service.py pushes them."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import lzma
import math
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from labkit.arguments import Parameters
from labkit.errors import LabError
from labkit.files import Json
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
            f"{package} is not installed for {sys.executable}, so it cannot be packed for Kaggle. Install it, in the "
            f"folder of a clone of labkit: {sys.executable} -m pip install . ./notebooks"
        )
    return Path(spec.origin).parent


def _metadata(package: str, folder: str) -> Iterator[tuple[str, bytes]]:
    try:
        own = distribution(package)
    except PackageNotFoundError:
        raise LabError(
            f"{package} is not installed for {sys.executable}, only imported from {_folder(package).parent}, so it "
            f"cannot be packed for Kaggle. Install it there: {sys.executable} -m pip install {_folder(package).parent}"
        ) from None
    headers = (own.read_text("METADATA") or "").partition("\n\n")[0].strip()  # without the README
    yield f"{folder}/METADATA", f"{headers}\n".encode()
    yield f"{folder}/WHEEL", f"Wheel-Version: 1.0\nGenerator: labkit\nRoot-Is-Purelib: true\nTag: {TAG}\n".encode()
    for file in sorted(own.files or ()):
        if file.name in ("entry_points.txt", "LICENSE") and file.parts[0].endswith(".dist-info"):
            yield "/".join([folder, *file.parts[1:]]), Path(str(file.locate())).read_bytes()


TWO_T4 = "NvidiaTeslaT4"  # Kaggle offers pairs only
# Kaggle documents no limit; others who push generated kernels stay below about one megabyte.
MOST_BYTES = 1_000_000
SHORTEST_TITLE = 5  # of title and slug; the client refuses shorter ones

WHEEL_CELL = "as a wheel in text, because a session may have no internet"  # identifies an export
LABS = re.compile(r"^\s*(?:from|import) labkit_labs\b", re.MULTILINE)
INSTALL = """\
# labkit {version} as a wheel in text, because a session may have no internet and Kaggle takes one file. `labkit kaggle`
# put it here. Where this version can already be imported, this does nothing.
def install(wheel, packed):
    import importlib.util, lzma, os, re, shutil, subprocess, sys, tempfile
    from functools import reduce
    from importlib.metadata import PackageNotFoundError, requires, version
    from pathlib import Path

    def installed(package):
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    package, its_version = wheel.split("-")[:2]

    def is_here():
        importlib.invalidate_caches()
        spec = importlib.util.find_spec(package)  # a folder of that name has no origin
        return bool(spec and spec.origin) and installed(package) == its_version

    if not is_here():
        digits = {{chr(c): i for i, c in enumerate(c for c in range(33, 127) if c not in (34, 92))}}
        text = "".join(packed.split())  # 16 digits are 13 bytes
        numbers = (reduce(lambda n, c: n * 92 + digits[c], text[i : i + 16], 0) for i in range(0, len(text), 16))
        file = Path(tempfile.mkdtemp(), wheel)
        file.write_bytes(lzma.LZMADecompressor().decompress(b"".join(n.to_bytes(13, "big") for n in numbers)))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(file)]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode or not is_here():
            why = (done.stderr.strip().splitlines() or ["it is not on sys.path"])[-1]
            print(f"{{package}}: pip could not install it ({{why}}); it is used from {{file.parent}}")
            shutil.unpack_archive(file, file.parent, "zip")
            sys.path.insert(0, str(file.parent))
            path = [str(file.parent), os.environ.get("PYTHONPATH")]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))  # for the ranks
    needed = [re.match(r"[\\w.-]+", need)[0] for need in requires(package) if "extra ==" not in need]
    if lacking := [package for package in needed if not installed(package)]:
        print(f"{{package}}: not installed here, so code that needs it will fail:", ", ".join(lacking))


{calls}del install
print("{mark}")
"""
CALL = '''\
install("{wheel}", """
{packed}
""")
'''


@dataclass(frozen=True)
class Kernel:
    """A notebook's text and its metadata for Kaggle."""

    notebook: str
    metadata: dict[str, Json]
    mark: str  # the line that its first cell prints

    @property
    def id(self) -> str:
        return str(self.metadata["id"])

    def write(self, folder: Path) -> None:
        """Write both files for `kaggle kernels push`; overwrites only an earlier export of the notebook."""
        notebook, described = folder / str(self.metadata["code_file"]), folder / "kernel-metadata.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            earlier = notebook.exists() and WHEEL_CELL in notebook.read_text(encoding="utf-8", errors="replace")
            if not earlier and (there := [path.name for path in (notebook, described) if path.exists()]):
                raise LabError(f"{folder} has a {there[0]} that is not an export; choose another folder with --into")
            notebook.write_text(self.notebook, encoding="utf-8")
            described.write_text(json.dumps(self.metadata, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise LabError(f"the kernel cannot be written into {folder}: {error.strerror}") from None


def build(
    notebook: str,
    *,
    name: str,
    user: str,
    push: str,
    wheel_of: Callable[[str], tuple[str, bytes]] = wheel,
    title: str | None = None,
    parameters: Parameters | None = None,
    internet: bool = False,
    accelerator: str | None = TWO_T4,
    inputs: Sequence[str] = (),
) -> Kernel:
    """The kernel of a notebook with this text and `name` ("03_ddp.ipynb").

    It brings labkit and, if it imports that, labkit_labs: `wheel_of` them. `inputs` are kernels whose output it reads.
    `push` identifies the push: the first cell prints it. Raises LabError for invalid notebooks, unknown parameters and
    invalid addresses.
    """
    if not re.fullmatch(r"[\w-]+", user):
        raise LabError(f"a Kaggle user name has only letters, digits, - and _; got {user!r}")
    for each in inputs:
        check_address(each)
    book = _parsed(notebook, name)
    title = title or "labkit " + re.sub(r"[^A-Za-z0-9]+", " ", Path(name).stem).strip()
    cells = [_stripped(cell) for cell in book["cells"]]
    wheels = [wheel_of("labkit"), *([wheel_of("labkit_labs")] if _imports_labs(cells) else [])]
    version = wheels[0][0].split("-")[1]
    mark = f"labkit {version}, push {push}"
    if parameters:
        cells = _with_parameters(cells, parameters, name)
    cells.insert(0, _install_cell(wheels, version, mark))
    if (book["nbformat"], book.get("nbformat_minor", 0)) >= (4, 5):
        for number, cell in enumerate(cells):
            cell.setdefault("id", f"labkit-{number}")
    kept = {key: value for key, value in book.get("metadata", {}).items() if key in ("kernelspec", "language_info")}
    text = json.dumps(book | {"cells": cells, "metadata": kept}, ensure_ascii=False, indent=1) + "\n"
    if (size := len(text.encode())) > MOST_BYTES:
        raise LabError(f"{name} would be a kernel of {size / 1e6:.2f} MB; Kaggle accepts about {MOST_BYTES / 1e6:g} MB")
    return Kernel(
        text,
        {
            "id": f"{user}/{_slug(title)}",
            "title": title,
            "code_file": Path(name).name,
            "language": "python",
            "kernel_type": "notebook",
            "is_private": True,
            "enable_gpu": accelerator is not None,
            "enable_tpu": False,
            "enable_internet": internet,
            "machine_shape": accelerator or "",
            "dataset_sources": [],
            "competition_sources": [],
            "kernel_sources": list(inputs),
            "model_sources": [],
        },
        mark,
    )


def check_address(kernel: str) -> None:
    """Raise LabError if this is not the address of a kernel."""
    if not re.fullmatch(r"[\w-]+/[\w-]+", kernel):
        raise LabError(f"a kernel is named USER/SLUG, as in kaggle.com/code/USER/SLUG; got {kernel!r}")


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        book = json.loads(text)
    except ValueError as error:
        raise LabError(f"{name} is not a notebook: {error}") from None
    cells = book.get("cells") if isinstance(book, dict) else None
    of_dicts = isinstance(cells, list) and all(isinstance(cell, dict) for cell in cells)
    if not isinstance(book, dict) or not of_dicts or book.get("nbformat") != 4:
        raise LabError(f"{name} is not a notebook of format 4, which has a list of cells")
    return book


def _stripped(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The cell without outputs, which Kaggle would discard, and with its source as one string, as Kaggle requires."""
    source = cell.get("source", "")
    kept = {**cell, "source": source if isinstance(source, str) else "".join(source)}
    return kept | {"outputs": [], "execution_count": None} if cell.get("cell_type") == "code" else kept


def _code_cell(source: str, **metadata: Any) -> dict[str, Any]:
    return {"cell_type": "code", "metadata": metadata, "source": source, "outputs": [], "execution_count": None}


def _imports_labs(cells: Sequence[Mapping[str, Any]]) -> bool:
    return any(cell.get("cell_type") == "code" and LABS.search(cell["source"]) for cell in cells)


def _install_cell(wheels: Sequence[tuple[str, bytes]], version: str, mark: str) -> dict[str, Any]:
    calls = ""
    for name, content in wheels:
        packed = _in_text(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
        lines = "\n".join(packed[i : i + 1000] for i in range(0, len(packed), 1000))
        calls += CALL.format(wheel=name, packed=lines)
    source = INSTALL.format(version=version, calls=calls, mark=mark)
    # folded: in Kaggle's editor and in JupyterLab
    return _code_cell(source, **{"_kg_hide-input": True, "jupyter": {"source_hidden": True}})


def _in_text(data: bytes) -> str:
    """The data in 16 digits for 13 bytes, all printable characters that JSON leaves alone: 1.5 % less than base 85."""
    digits = [chr(c) for c in range(33, 127) if c not in (34, 92)]  # neither " nor \\
    numbers = (int.from_bytes(data[i : i + 13].ljust(13, b"\0"), "big") for i in range(0, len(data), 13))
    return "".join(digits[number // 92**place % 92] for number in numbers for place in range(15, -1, -1))


def _with_parameters(cells: list[dict[str, Any]], values: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Inject parameters like papermill: in a new cell after the one tagged `parameters`."""
    known, place = set(), None
    cells = [cell for cell in cells if "injected-parameters" not in _tags(cell)]
    for number, cell in enumerate(cells):
        if "parameters" in _tags(cell):
            known, place = _assigned(cell["source"], name), number + 1
            break
    for parameter in values:
        if parameter not in known:
            has = f"it has {', '.join(sorted(known))}" if known else "it has no cell tagged `parameters`"
            raise LabError(f"{name} has no parameter {parameter!r}; {has}")
    lines = [f"{key} = {_literal(value)}\n" for key, value in values.items()]
    return [*cells[:place], _code_cell("# Parameters\n" + "".join(lines), tags=["injected-parameters"]), *cells[place:]]


def _tags(cell: Mapping[str, Any]) -> Sequence[str]:
    tags: Sequence[str] = cell.get("metadata", {}).get("tags", ())
    return tags


def _assigned(source: str, name: str) -> set[str]:
    targets: list[ast.expr] = []
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise LabError(f"the parameters cell of {name} is not plain Python: {error}") from None
    for node in body:
        targets += [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _literal(value: Any) -> str:
    return f"float('{value}')" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def _slug(title: str) -> str:
    """The address that Kaggle derives from a title; for ASCII only, because its other rules are unknown."""
    if not re.fullmatch(r"[A-Za-z0-9 _-]+", title):
        raise LabError(f"a title may have the letters a to z, digits, spaces, - and _; got {title!r}")
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    if len(title) < SHORTEST_TITLE or len(slug) < SHORTEST_TITLE:
        raise LabError(f"a title needs at least {SHORTEST_TITLE} letters or digits; got {title!r}")
    return slug
