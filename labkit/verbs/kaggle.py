"""Exports and pushes notebooks to Kaggle, and pulls their runs, from a terminal."""

from __future__ import annotations

import argparse
import secrets
import tempfile
from pathlib import Path
from typing import Any

from labkit.errors import LabError
from labkit.kaggle import (
    DATASET,
    FROM_UPLOAD,
    MOST_BYTES,
    TWO_T4,
    Kernel,
    Service,
    build,
    check_address,
    embedded_cell,
    wheel,
    write_dataset,
)
from labkit.stored_runs import runs_root
from labkit.text import gib, plain
from labkit.version import __version__

CELL_HELP = """Print a cell for Kaggle's or Colab's editor. It installs labkit from its wheel, without internet, and
says which of the packages that labkit needs are missing. Add the wheel as a dataset first (labkit kaggle dataset), or
upload it into Colab's /content; with --embedded the cell itself holds it."""
DATASET_HELP = (
    """Write a folder with labkit's wheel and the metadata of a private dataset, for `kaggle datasets create`."""
)


def add_kaggle_verbs(parser: argparse.ArgumentParser) -> None:
    """Add the verbs of `labkit kaggle`."""
    verbs = parser.add_subparsers(dest="kaggle", required=True, metavar="VERB")
    export = verbs.add_parser("export", help=(text := "write the kernel's folder without pushing it"), description=text)
    _kernel_options(export)
    export.add_argument("--into", type=Path, metavar="DIR", help="default: a new folder named like its slug")
    export.set_defaults(run=_export)
    push = verbs.add_parser("push", help=(text := "run a notebook on Kaggle and fetch its runs"), description=text)
    _kernel_options(push)
    push.add_argument("--no-follow", action="store_true", help="return after the upload")
    push.set_defaults(run=_push)
    pull = verbs.add_parser("pull", help=(text := "follow a kernel to its end, fetch its runs"), description=text)
    pull.add_argument("kernel", help="USER/SLUG, as in kaggle.com/code/USER/SLUG")
    pull.set_defaults(run=_pull)
    cell = verbs.add_parser("cell", help="print a cell for Kaggle's or Colab's editor", description=CELL_HELP)
    cell.add_argument("--embedded", action="store_true", help="labkit in the cell's own text, instead of a wheel")
    dataset = verbs.add_parser(
        "dataset", help="write the wheel that this cell installs, as a dataset for Kaggle", description=DATASET_HELP
    )
    dataset.add_argument("--into", type=Path, default=Path(DATASET), metavar="DIR", help=f"default: {DATASET}")
    dataset.add_argument("--user", help="owner of the dataset (default: the logged-in user)")
    for verb, run in ((cell, _cell), (dataset, _dataset)):
        verb.add_argument("--labs", action="store_true", help="with the package of the labs")
        verb.set_defaults(run=run)
    for verb in (export, push, pull, cell, dataset):
        verb.add_argument("--runs-dir", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _kernel_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebook", type=Path)
    parser.add_argument(
        "-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="a parameter, as papermill sets it"
    )
    parser.add_argument("--internet", action="store_true", help="default: off")
    parser.add_argument(
        "--accelerator", default=TWO_T4, metavar="NAME", help=f"default: {TWO_T4}, which is two; or none"
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="KERNEL",
        help="USER/SLUG of a kernel whose output it reads, to resume from checkpoints",
    )
    parser.add_argument(
        "--there",
        action="append",
        default=[],
        metavar="NAME",
        help="a module or file that Kaggle will have, which is therefore neither brought nor missed",
    )
    parser.add_argument("--user", help="owner of the kernel (default: the logged-in user)")
    parser.add_argument("--title", help="title, which determines the slug (default: labkit and the notebook's name)")


def _export(arguments: argparse.Namespace, rest: list[str]) -> int:
    arguments.user = arguments.user or _logged_in("a kernel")
    kernel = _kernel(arguments)
    folder = arguments.into or Path(kernel.id.partition("/")[2])
    kernel.write(folder)
    print(f"{folder}: {kernel.id}, {_size(kernel)}. Push it with: kaggle kernels push -p {folder}")
    _print_files(kernel)
    return 0


def _logged_in(what: str) -> str:
    try:
        return Service().user
    except LabError as error:
        raise LabError(f"{what}'s name starts with a user name, so pass --user; {error}") from None


def _size(kernel: Kernel) -> str:
    return f"{len(kernel.notebook.encode()) / 1e6:.2f} of {MOST_BYTES / 1e6:g} MB"


def _print_files(kernel: Kernel) -> None:
    """The files that the kernel brings, with their sizes and the places that need them; and what it may lack."""
    if kernel.files:
        print("its first cell also brings, unless they are there already:")
    width = max((len(file.name) for file in kernel.files), default=0)
    for file in kernel.files:
        print(plain(f"  {file.name:<{width}}  {gib(file.size):>9}  {file.why}"))
    if kernel.unsure:
        print(plain(f"not here, so not brought, if it does not make them itself: {', '.join(kernel.unsure)}"))


def _cell(arguments: argparse.Namespace, rest: list[str]) -> int:
    if not arguments.embedded:
        print(FROM_UPLOAD, end="")
        return 0
    print(embedded_cell([wheel(package) for package in _packages(arguments)], f"labkit {__version__}"), end="")
    return 0


def _dataset(arguments: argparse.Namespace, rest: list[str]) -> int:
    folder = arguments.into
    for file in write_dataset(folder, arguments.user or _logged_in("a dataset"), _packages(arguments)):
        print(f"{file}, {gib(file.stat().st_size)}")
    print(f"Upload it with: kaggle datasets create -p {folder}")
    print(f"or, if it is there already: kaggle datasets version -p {folder} -m 'labkit {__version__}'")
    print("or in a browser: kaggle.com/datasets, New Dataset. Then: labkit kaggle cell")
    return 0


def _packages(arguments: argparse.Namespace) -> list[str]:
    return ["labkit", *(["labkit_labs"] if arguments.labs else [])]


def _push(arguments: argparse.Namespace, rest: list[str]) -> int:
    service = Service()
    arguments.user = arguments.user or service.user
    kernel = _kernel(arguments)
    with tempfile.TemporaryDirectory(prefix="labkit-kaggle-") as folder:
        kernel.write(Path(folder))
        url = service.push(Path(folder))
    print(f"{kernel.id}, {_size(kernel)}, runs at {url}", flush=True)
    _print_files(kernel)
    if arguments.no_follow:
        print(_come_back(kernel.id))
        return 0
    return _see_through(service, kernel.id, arguments, kernel.mark)


def _pull(arguments: argparse.Namespace, rest: list[str]) -> int:
    check_address(arguments.kernel)
    return _see_through(Service(), arguments.kernel, arguments)


def _see_through(service: Service, kernel: str, arguments: argparse.Namespace, mark: str = "") -> int:
    """Follow a kernel to its end and fetch its runs. Returns 1 if it failed."""
    from labkit.kaggle import follow, pull_runs  # imports the views, which the help does not need

    try:
        status = follow(service, kernel, mark=mark)
        new, known = pull_runs(service, kernel, runs_root(arguments.runs_dir))
    except KeyboardInterrupt:
        print(f"\n{_come_back(kernel)}")
        raise
    except LabError as error:
        raise LabError(f"{error}. It may still be running; follow it with: labkit kaggle pull {kernel}") from None
    for folder in new:
        print(plain(f"{folder.path}"))
    for run in known:
        print(plain(f"{run} already exists and was not changed"))
    if not new and not known:
        print("its output has no runs")
    if status.name == "COMPLETE":
        return 0
    print(plain(f"{kernel}: {status.name}. {status.message}".rstrip()))
    return 1


def _come_back(kernel: str) -> str:
    return f"{kernel} continues; follow it with: labkit kaggle pull {kernel}"


def _kernel(arguments: argparse.Namespace) -> Kernel:
    try:
        text = arguments.notebook.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{arguments.notebook} cannot be read: {error}") from None
    return build(
        text,
        name=arguments.notebook.name,
        user=arguments.user,
        push=secrets.token_hex(4),
        folder=arguments.notebook.parent,
        there=arguments.there,
        title=arguments.title,
        parameters={name: _value(text) for name, text in arguments.p},
        internet=arguments.internet,
        accelerator=None if arguments.accelerator == "none" else arguments.accelerator,
        inputs=arguments.input,
    )


def _value(text: str) -> Any:
    """The value as parsed by papermill's `-p`."""
    named = {"True": True, "False": False, "None": None}
    if text in named:
        return named[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
