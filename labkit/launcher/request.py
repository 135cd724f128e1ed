"""What is launched: a script, its file, arguments and options, checked before anything is created."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

from labkit.errors import LaunchError, ScriptError
from labkit.files import is_a
from labkit.launcher import checks
from labkit.launcher.torchrun import script_folder
from labkit.record import RunFolder
from labkit.session import current_folder, seconds_to_train
from labkit.text import plain
from labkit.write import (
    LaunchOptions,
    Script,
    check_flags,
    command_line,
    completed,
    options_of,
    read_back,
    read_file,
    script_names,
)

__all__ = [
    "LaunchRequest",
    "Launchable",
    "Module",
    "check",
    "check_values",
    "checkpoint_arguments",
    "fewer_ranks",
    "script_and_file",
    "session_deadline",
    "with_options",
]

MAIN = "__main__.py"  # what Python runs of a folder or an archive


@dataclass(frozen=True)
class Module:
    """A module that Python finds by its name and runs, as `python -m` does."""

    name: str


Launchable = Script | Module | str | os.PathLike[str]


@dataclass(frozen=True)
class LaunchRequest:
    """A script that passed the checks. `path` is the file of a user's own script, `program` how the user names it to
    Python: as a file, a folder or an archive, or with `-m` and a module. `argv` are its arguments, `options` the
    options among them."""

    script: Script
    path: Path | None
    program: list[str]
    argv: list[str]
    options: dict[str, str]

    def words(self, folder: RunFolder) -> list[str]:
        """What Python is to start: the user's own program, or the script in the run's folder."""
        return self.program or [str(folder.script)]

    @property
    def file(self) -> str | None:
        """What Python calls the user's own file, in tracebacks for example."""
        if self.path is None or self.program[0] == "-m":
            return str(self.path) if self.path else None
        file = os.path.join(current_folder(), self.program[0])  # noqa: PTH118  # with "./" as given
        return f"{file}/{MAIN}" if self.path.name == MAIN else file


def script_and_file(script: Launchable) -> tuple[Script, Path | None]:
    """The script, and its file if it is the user's own."""
    if isinstance(script, Script):
        return script, None
    if isinstance(script, Module):
        path = _file_of(script.name)
        has_text = is_a(Path.is_file, path)
        return Script.read(read_file(path), path) if has_text else Script.parse("", name=path.stem), path
    if not isinstance(script, str | os.PathLike) or not str(script).strip():
        raise ScriptError(f"launch takes a Script, the name of one, or a path; got {script!r}")
    if isinstance(script, str) and script in script_names():
        return Script.load(script), None
    path = Path(script).absolute()
    if str(path) != str(path).encode("utf-8", "replace").decode():
        raise ScriptError(f"the path {ascii(str(path))} is not UTF-8 and cannot be recorded; rename the script")
    if is_a(Path.is_file, path / MAIN):
        return Script.read(read_file(path / MAIN), path / MAIN, name=path.name), path / MAIN
    if is_a(Path.is_file, path) and is_zipfile(path):
        with suppress(KeyError), ZipFile(path) as archive:
            return Script.read(archive.read(MAIN), path / MAIN, name=path.stem), path / MAIN
    return Script.load(script), path


def _name(file: str) -> str:
    return f"./{file}" if file.startswith("-") else file  # torchrun would take it for an option


def _file_of(module: str) -> Path:
    """Where Python finds a module, without importing any; where this folder would have it if it is not found here."""
    parts, folders = module.split("."), [str(current_folder()), *sys.path]
    expected = Path(current_folder(), *parts).with_suffix(".py")
    file = None
    for name in [*parts, MAIN.removesuffix(".py")]:
        if (spec := PathFinder.find_spec(name, folders)) is None:
            return Path(file) if file and f"{name}.py" == MAIN else expected
        file, folders = spec.origin, list(spec.submodule_search_locations or ())
    return Path(file) if file else expected


def check(
    script: Launchable,
    args: Sequence[Any],
    parameters: Mapping[str, Any],
    ranks: int,
    python_path: str = "",
    *,
    source: Path | None = None,
) -> LaunchRequest:
    """Check a script with its arguments for this number of ranks; one of labkit's own gets the extras that its options
    need. `python_path` is the ranks' PYTHONPATH, `source` the user's own file from which a Script was read. Raises
    LaunchError or ScriptError when it could not train; of the user's own file, only Python itself knows what it
    imports and which names it has, so what seems to be missing is printed to stderr.
    """
    given = script
    script, path = script_and_file(script)
    path = path or source
    if path is None:
        script.check()
        names = [name for name, value in parameters.items() if value is not None]
        script = _completed(script, names, checks.check_arguments(args))
        checks.check_imports(script, [script_folder(None), *filter(None, python_path.split(os.pathsep))])
    else:
        script.check_syntax()
    program = ["-m", given.name] if isinstance(given, Module) else [] if path is None else [_name(str(source or given))]
    request = check_values(script, path, program, args, parameters, ranks)
    for doubt in _doubts(script, path, python_path) if path else ():
        print(plain(doubt), file=sys.stderr, flush=True)
    return request


def _doubts(script: Script, path: Path, python_path: str) -> Iterator[str]:
    try:
        script.check()
    except ScriptError as error:
        yield str(error)
    yield from checks.imports_in_doubt(script, script_folder(path), python_path)


def check_values(
    script: Script,
    path: Path | None,
    program: list[str],
    args: Sequence[Any],
    parameters: Mapping[str, Any],
    ranks: int,
) -> LaunchRequest:
    """Check arguments for a script that has been checked itself. Raises LaunchError or ScriptError."""
    argv = checks.check_arguments([*command_line(script, parameters), *checks.check_arguments(args)])
    if path is None:  # a user's own script may add options in another module
        check_flags(script, argv)
    options = read_back(script, argv)
    if path is None:
        checks.check_numbers(script, options)
    checks.check_batch(script, options, ranks)
    return LaunchRequest(script, path, program, argv, options)


def _completed(script: Script, names: Sequence[str], args: Sequence[str] = ()) -> Script:
    whole = completed(script, names, args)
    if whole is not script:
        whole.check()
    return whole


def with_options(request: LaunchRequest, options: Iterable[str]) -> LaunchRequest:
    """The request with the extras that declare these options, which the launch sets itself. A user's own file is left
    unchanged, and so is a script whose own cells conflict with the extra's."""
    if request.path is not None:
        return request
    try:
        return replace(request, script=_completed(request.script, list(options)))
    except ScriptError:
        return request


def session_deadline(request: LaunchRequest) -> dict[str, str]:
    """`deadline_seconds`, if this process runs in a session with a time limit. Prints what the run will do."""
    seconds = seconds_to_train()
    if seconds is None or "deadline_seconds" in request.options:
        return {}
    if "deadline_seconds" not in options_of(with_options(request, ["deadline_seconds"]).script):
        return {}
    print(f"Kaggle sessions are limited: this run saves and stops after {seconds:.0f} s (deadline_seconds=0: never)")
    return {"deadline_seconds": f"{seconds:.0f}"}


def checkpoint_arguments(request: LaunchRequest, added: Mapping[str, str], folder: RunFolder) -> list[str]:
    """`--checkpoint-dir` in the run folder, unless the user chose one. `added` are options on top of the request's."""
    values, options = {**request.options, **added}, options_of(request.script)
    saves = any(values.get(option, "0") != "0" for option in ("save_every", "deadline_seconds", "validate_every"))
    if not saves or "checkpoint_dir" in values or "checkpoint_dir" not in options:
        return []
    return ["--checkpoint-dir", str(folder.checkpoints)]


def fewer_ranks(request: LaunchRequest, ranks: int, options: LaunchOptions) -> list[int]:
    """The numbers of ranks with which a retry may continue, the largest first. Raises LaunchError if `min_ranks` is not
    a number of ranks or allows none."""
    least = options.min_ranks
    if least is None:
        return []
    if least >= ranks:
        raise LaunchError(f"min_ranks must be an integer, at least 1 and less than {ranks}, got {least!r}")
    if options.retries < 2:
        raise LaunchError("min_ranks needs retries=2 or more: the first retry uses all ranks, the second one fewer")
    if checks.SPLITS_REPLICAS.search(str(request.script)):
        raise LaunchError(
            "min_ranks needs ranks that each train on a part of the batch (ddp, zero1, zero2, fsdp, fsdp1); those of "
            f"{request.script.name} split one model or sequence"
        )
    fewer = []
    for count in range(ranks - 1, least - 1, -1):
        try:
            checks.check_batch(request.script, request.options, count)
            fewer.append(count)
        except LaunchError as error:
            reason = error
    if not fewer:
        raise LaunchError(f"no number of ranks from min_ranks={least} to {ranks - 1} works: {reason}")
    return fewer
