"""Makes the two files of a Kaggle kernel from a notebook, which bring labkit as a wheel and the files that the notebook
needs. service.py pushes them."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.arguments import Parameters
from labkit.errors import LabError
from labkit.files import Json
from labkit.kaggle.cells import IN_TEXT, embedded_cell
from labkit.kaggle.image import MODULES
from labkit.kaggle.wheels import wheel
from labkit.text import gib

if TYPE_CHECKING:
    from labkit.needs import NeededFile, Needs

TWO_T4 = "NvidiaTeslaT4"  # Kaggle offers pairs only
# Kaggle documents no limit; others who push generated kernels stay below about one megabyte.
MOST_BYTES = 1_000_000
MOST_PACKED_BYTES = 20_000_000  # before they are compressed: more would never fit
SHORTEST_TITLE = 5  # of title and slug; the client refuses shorter ones

LABS = re.compile(r"^\s*(?:from|import) labkit_labs\b", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """A notebook's text and its metadata for Kaggle."""

    notebook: str
    metadata: dict[str, Json]
    mark: str  # the line that its first cell prints
    files: tuple[NeededFile, ...] = ()  # what its first cell brings besides labkit
    unsure: tuple[str, ...] = ()  # paths of data that are not here, which it may read

    @property
    def id(self) -> str:
        return str(self.metadata["id"])

    def write(self, folder: Path) -> None:
        """Write both files for `kaggle kernels push`; overwrites only an earlier export of the notebook."""
        notebook, described = folder / str(self.metadata["code_file"]), folder / "kernel-metadata.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            earlier = notebook.exists() and IN_TEXT in notebook.read_text(encoding="utf-8", errors="replace")
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
    folder: Path | None = None,
    there: Collection[str] = (),
    wheel_of: Callable[[str], tuple[str, bytes]] = wheel,
    title: str | None = None,
    parameters: Parameters | None = None,
    internet: bool = False,
    accelerator: str | None = TWO_T4,
    inputs: Sequence[str] = (),
) -> Kernel:
    """The kernel of a notebook with this text and `name` ("03_ddp.ipynb").

    It brings labkit and, if it imports that, labkit_labs: `wheel_of` them. It also brings the files in `folder` that it
    needs, except modules and files that will be `there` anyway. `inputs` are kernels whose output it reads. `push`
    identifies the push: the first cell prints it. Raises LabError for invalid notebooks, unknown parameters and invalid
    addresses, and for files that are missing or too large.
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
    needs = _needs(cells, name, folder, there)
    # folded: in Kaggle's editor and in JupyterLab
    folded = {"_kg_hide-input": True, "jupyter": {"source_hidden": True}}
    cells.insert(0, _code_cell(embedded_cell(wheels, mark, _contents(needs.files)), **folded))
    if (book["nbformat"], book.get("nbformat_minor", 0)) >= (4, 5):
        for number, cell in enumerate(cells):
            cell.setdefault("id", f"labkit-{number}")
    kept = {key: value for key, value in book.get("metadata", {}).items() if key in ("kernelspec", "language_info")}
    text = json.dumps(book | {"cells": cells, "metadata": kept}, ensure_ascii=False, indent=1) + "\n"
    if (size := len(text.encode())) > MOST_BYTES:
        advice = f". {_too_large(needs)}" if needs.files else ""
        raise LabError(
            f"{name} would be a kernel of {size / 1e6:.2f} MB; Kaggle accepts about {MOST_BYTES / 1e6:g} MB{advice}"
        )
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
        needs.files,
        needs.unsure,
    )


def _needs(cells: Sequence[Mapping[str, Any]], name: str, folder: Path | None, there: Collection[str]) -> Needs:
    """The files that the notebook needs in the folder; none without one. Raises LabError if some are missing, or cannot
    be brought."""
    from labkit.needs import Needs, needs_of_notebook  # parses programs, which the help does not need

    if folder is None:
        return Needs(())
    sources = [str(cell["source"]) for cell in cells if cell.get("cell_type") == "code"]
    needs = needs_of_notebook(sources, folder, there=there, installed=MODULES)
    if needs.missing:
        first = needs.missing[0].partition(" ")[0]
        raise LabError(
            f"{name} needs what is neither installed here nor beside it: {', '.join(needs.missing)}. Put it "
            f"there; or, if Kaggle will have it, for example because its image does, pass --there {first}"
        )
    if needs.outside:
        raise LabError(
            f"{name} needs files outside of its folder, which cannot be at the same place on Kaggle: "
            f"{', '.join(needs.outside)}. Copy them beside the notebook and change their paths in it"
        )
    if needs.size > MOST_PACKED_BYTES:
        raise LabError(
            f"{name} needs {gib(needs.size)} of files, and a kernel is one file of 1 MB. {_too_large(needs)}"
        )
    return needs


def _too_large(needs: Needs) -> str:
    """What to do with files that do not fit into a kernel."""
    largest = sorted(needs.files, key=lambda file: -file.size)
    largest = [file for file in largest[:3] if file.size * 10 >= largest[0].size]
    told = ", ".join(f"{file.name} ({gib(file.size)}, {file.why})" for file in largest)
    return (
        f"Largest of the files that it brings: {told}. Upload large ones as a dataset (kaggle.com/datasets, New "
        "Dataset), add it to the notebook with Add Input, open them below /kaggle/input, and pass "
        f"--there {largest[0].name} here"
    )


def _contents(files: Sequence[NeededFile]) -> dict[str, tuple[bytes, int]]:
    try:
        return {file.name: (file.path.read_bytes(), file.path.stat().st_mode & 0o777) for file in files}
    except OSError as error:
        raise LabError(f"{error.filename} is needed and cannot be read: {error.strerror}") from None


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
    are_cells = isinstance(cells, list) and all(isinstance(cell, dict) and _has_text(cell) for cell in cells)
    if not isinstance(book, dict) or not are_cells or book.get("nbformat") != 4:
        raise LabError(f"{name} is not a notebook of format 4, which has a list of cells")
    return book


def _has_text(cell: Mapping[str, Any]) -> bool:
    source = cell.get("source", "")
    return isinstance(source, str) or (isinstance(source, list) and all(isinstance(line, str) for line in source))


def _stripped(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The cell without outputs, which Kaggle would discard, and with its source as one string, as Kaggle requires."""
    source = cell.get("source", "")
    kept = {**cell, "source": source if isinstance(source, str) else "".join(source)}
    return kept | {"outputs": [], "execution_count": None} if cell.get("cell_type") == "code" else kept


def _code_cell(source: str, **metadata: Any) -> dict[str, Any]:
    return {"cell_type": "code", "metadata": metadata, "source": source, "outputs": [], "execution_count": None}


def _imports_labs(cells: Sequence[Mapping[str, Any]]) -> bool:
    return any(cell.get("cell_type") == "code" and LABS.search(cell["source"]) for cell in cells)


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
