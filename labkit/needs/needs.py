"""Collects the files that a program needs beside it, and names what is missing."""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from labkit.files import is_a
from labkit.needs.mentions import Mention, Program, of_cells, of_script, of_shell_script
from labkit.needs.modules import is_somewhere, local_place

# Made by what a program uses, in folders of these names; none of it is an input.
OUTPUTS = {"runs", "lightning_logs", "wandb", "mlruns", "__pycache__", ".ipynb_checkpoints", ".git"}
# Kaggle's own folders, seen from its working folder.
KAGGLES = ("../input", "../working", "../temp")
MOST_LISTED = 10_000  # files of one folder


@dataclass(frozen=True)
class NeededFile:
    """`path` is the file; the program finds it by `name`, relative to the folder in which it runs, with `/`. `why` is
    the place that first needs it ("cell 3, line 1"), `size` is in bytes."""

    path: Path
    name: str
    size: int
    why: str


@dataclass(frozen=True)
class Needs:
    """What a program needs beside it. `missing` and `outside` are sentences: what is nowhere, and what lies outside of
    the folder and therefore cannot be found by the same path elsewhere."""

    files: tuple[NeededFile, ...]
    missing: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def needs_of_notebook(
    cells: Sequence[str], folder: Path, *, there: Collection[str] = (), installed: Collection[str] = ()
) -> Needs:
    """What the code cells of a notebook need in `folder`, in which they run.

    Included are modules that they import, scripts that they launch and files whose paths they name, and what those
    need. `there` are modules and paths that will be there without being carried; `installed` are modules that will be
    installed there, though they may not be here. What is computed is not known.
    """
    walk = _Walk(folder, there, installed)
    walk.add(of_cells(cells), folder)
    return walk.result()


def needs_of_script(
    script: bytes,
    name: str,
    folder: Path,
    *,
    own: Path | None = None,
    args: Sequence[str] = (),
    there: Collection[str] = (),
) -> Needs:
    """What a script needs when it is started in `folder` with `args`. `name` is displayed; `own` is the folder in which
    it lies, where Python looks for its modules first, by default the same. The script itself is not included."""
    walk = _Walk(folder, there)
    own = own or folder
    file = os.path.relpath(own / Path(name).name, folder)
    program = of_script(script, name, file=file)
    for word in args:
        path = str(word).rpartition("=")[2] if str(word).startswith("-") else str(word)
        program.see("named", os.path.normpath(path), f"the argument {word}")
    walk.add(program, own)
    return walk.result()


@dataclass
class _Walk:
    """`folder` is where everything runs. `files` are found so far, by name."""

    folder: Path
    there: Collection[str]
    installed: Collection[str] = ()
    files: dict[str, NeededFile] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)  # modules
    programs: list[tuple[Program, Path, tuple[str, ...]]] = field(default_factory=list)
    made: set[str] = field(default_factory=set)  # paths that programs write before they read them
    followed: set[Path] = field(default_factory=set)  # modules and whole packages

    def add(self, program: Program, own: Path, package: tuple[str, ...] = ()) -> None:
        """A program whose modules are first looked for in `own`; of a module, `package` is what holds it."""
        self.programs.append((program, own, package))
        first: dict[str, Mention] = {}
        for mention in program.mentions:
            if mention.kind in ("read", "written"):
                first.setdefault(mention.name, mention)
                read_first = first[mention.name].kind == "read" and first[mention.name].sure
                if mention.kind == "written" and not read_first:
                    self.made.add(mention.name)
        self.made |= {*program.writes}
        for name, text in program.writes.items():
            if name.endswith(".py"):
                self.add(of_script(text.encode(), name, file=name), self.folder)

    def _walk(self) -> None:
        """Follow all modules and scripts, then take the other files, when all that write files are known."""
        for program, own, package in self.programs:  # which grows meanwhile
            folders = [own, self.folder, *(self.folder / each for each in program.search)]
            for mention in program.mentions:
                if mention.kind == "module":
                    self._module(mention, own, folders, package)
                elif mention.name.endswith((".py", ".sh")):
                    self._path(mention, own)
        for program, own, _ in self.programs:
            for mention in program.mentions:
                if mention.kind in ("read", "named", "passed", "listed"):
                    self._path(mention, own)

    def _module(self, mention: Mention, own: Path, folders: list[Path], package: tuple[str, ...]) -> None:
        module, _, member = mention.name.partition(":")
        level = len(module) - len(module.lstrip("."))
        if level:
            if level > len(package):
                return
            module = ".".join([*package[: len(package) - level + 1], *filter(None, [module[level:]])])
        names = [module, f"{module}.{member}"] if member and member != "*" else [module]
        top = module.partition(".")[0]
        if not top or top in self.there or f"{top}.py" in self.made:
            return
        place = local_place(top, folders, self.installed)
        if place is None:
            if mention.sure and top not in self.installed and not is_somewhere(top):
                self.lacking.setdefault(top, mention.place)
            return
        base = own if not _is_within(place, self.folder) else place  # elsewhere it is put beside what imports it
        if base / top not in self.followed and (place / top / "__init__.py").is_file():
            self.followed.add(base / top)
            for path in sorted((place / top).rglob("*.py")):
                self._take(path, base / path.relative_to(place), mention)
        for each in names:
            self._read_module(each.split("."), place, base, folders, mention)

    def _read_module(self, parts: list[str], place: Path, base: Path, folders: list[Path], mention: Mention) -> None:
        """Follow a module and the packages that hold it."""
        for length in range(1, len(parts) + 1):
            path = place.joinpath(*parts[:length])
            is_package = (path / "__init__.py").is_file()
            file = path / "__init__.py" if is_package else path.with_name(f"{path.name}.py")
            target = base / file.relative_to(place)
            if target in self.followed or not file.is_file():
                continue
            self.followed.add(target)
            self._take(file, target, mention)
            package = tuple(parts[:length] if is_package else parts[: length - 1])
            shown = _relative(target, self.folder)
            program = of_script(file.read_bytes(), shown, file=shown, is_module=True, sure=mention.sure)
            program.search = [_relative(each, self.folder) for each in folders]
            self.add(program, base, package)

    def _path(self, mention: Mention, own: Path) -> None:
        name = mention.name
        if not _is_judged(name) or name in self.there or name in self.made:
            return
        if mention.kind == "listed":
            for path in self._listed(name):
                self._take(path, path, mention)
            return
        path = self.folder / name
        if not is_a(Path.is_file, path):
            beside = own / name  # what importlib.resources opens
            if own == self.folder or mention.sure or not is_a(Path.is_file, beside) or "." not in name:
                return
            path = beside
        if not _is_within(path, self.folder):
            if mention.kind in ("script", "read"):
                self.outside.setdefault(name, mention.place)
            return
        if self._take(path, path, mention):
            self._follow(path)

    def _follow(self, path: Path) -> None:
        name = _relative(path, self.folder)
        if path.suffix == ".py":
            self.add(of_script(path.read_bytes(), name, file=name), path.parent)
        elif path.suffix == ".sh":
            self.add(of_shell_script(path.read_bytes(), name), self.folder)

    def _listed(self, name: str) -> Iterator[Path]:
        """The files of a folder, or of a pattern."""
        found: Iterator[Path]
        if glob.has_magic(name):
            found = self.folder.glob(name)
        elif is_a(Path.is_dir, self.folder / name):
            found = (self.folder / name).rglob("*")
        else:
            found = iter([self.folder / name])
        for path in islice(found, MOST_LISTED):
            if (
                path.is_file()
                and _is_within(path, self.folder)
                and not OUTPUTS & {*path.relative_to(self.folder).parts}
            ):
                yield path

    def _take(self, path: Path, target: Path, mention: Mention) -> bool:
        """Whether the file is a new one."""
        name = _relative(target, self.folder)
        if name in self.files or name in self.there:
            return False
        self.files[name] = NeededFile(path, name, path.stat().st_size, mention.place)
        return True

    def result(self) -> Needs:
        self._walk()
        programs = [program for program, *_ in self.programs]
        missing = {f"{name} (imported in {place})": place for name, place in self.lacking.items()}
        if any(program.installs for program in programs):
            missing = {}
        if not any(program.moves or program.downloads for program in programs):
            missing |= {f"{mention.name} ({mention.place})": mention.place for mention in self._unreadable(programs)}
        outside = tuple(f"{name} ({place})" for name, place in self.outside.items())
        return Needs(tuple(self.files.values()), tuple(missing), outside)

    def _unreadable(self, programs: list[Program]) -> Iterator[Mention]:
        """What is surely read, is not there, and that nothing in the programs could make."""
        mentions = [mention for program in programs for mention in program.mentions]
        made = self.made | {mention.name for mention in mentions if mention.kind in ("written", "passed", "listed")}
        told: set[str] = set()
        for mention in mentions:
            name = mention.name
            if mention.kind not in ("read", "script") or not mention.sure or name in told or name in self.there:
                continue
            if not _is_judged(name) or glob.has_magic(name) or is_a(Path.exists, self.folder / name):
                continue
            told.add(name)
            if not any(name == each or name.startswith((f"{each}/", f"{each}.")) or each == "." for each in made):
                yield mention


def _is_judged(name: str) -> bool:
    """Whether a path is one of the user's own files, below the folder or beside it."""
    path = Path(name)
    return (
        bool(path.parts)
        and not path.is_absolute()
        and not name.startswith(("~", *KAGGLES))
        and name != ".."
        and (path.parts[0] not in OUTPUTS)
    )


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def _is_within(path: Path, folder: Path) -> bool:
    return not _relative(path, folder).startswith("..")
