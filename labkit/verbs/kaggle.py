"""Exports and pushes notebooks to Kaggle, and pulls their runs, from a terminal."""

from __future__ import annotations

import argparse
import secrets
import tempfile
from pathlib import Path
from typing import Any

from labkit.errors import LabError
from labkit.kaggle import TWO_T4, Kernel, Service, build, check_address
from labkit.stored_runs import runs_root
from labkit.text import gib, plain


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
    for verb in (export, push, pull):
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
    parser.add_argument("--user", help="owner of the kernel (default: the logged-in user)")
    parser.add_argument("--title", help="title, which determines the slug (default: labkit and the notebook's name)")


def _export(arguments: argparse.Namespace, rest: list[str]) -> int:
    if not arguments.user:
        try:
            arguments.user = Service().user
        except LabError as error:
            raise LabError(f"a kernel's name starts with a user name: pass --user, or log in. {error}") from None
    kernel = _kernel(arguments)
    folder = arguments.into or Path(kernel.id.partition("/")[2])
    kernel.write(folder)
    size = len(kernel.notebook.encode())
    print(f"{folder}: {kernel.id}, {gib(size)}. Push it with: kaggle kernels push -p {folder}")
    return 0


def _push(arguments: argparse.Namespace, rest: list[str]) -> int:
    service = Service()
    arguments.user = arguments.user or service.user
    kernel = _kernel(arguments)
    with tempfile.TemporaryDirectory(prefix="labkit-kaggle-") as folder:
        kernel.write(Path(folder))
        url = service.push(Path(folder))
    print(f"{kernel.id} runs at {url}", flush=True)
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
