"""Collects the files that a program needs beside it, and names what is missing."""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from labkit.errors import LabError
from labkit.files import is_a
from labkit.needs.mentions import PROGRAMS, Mention, Program, of_cells, of_notebook, of_script, of_shell_script
from labkit.needs.modules import is_somewhere, local_place

# Made by what a program uses, in folders of these names; none of it is an input.
OUTPUTS = {"runs", "lightning_logs", "wandb", "mlruns", "__pycache__", ".ipynb_checkpoints", ".git"}
# Of files that programs rather read than make.
DATA = {".csv", ".tsv", ".jsonl", ".parquet", ".feather", ".yaml", ".yml", ".toml", ".npy", ".npz", ".h5", ".txt"}
# Kaggle's own folders, seen from its working folder.
KAGGLES = ("../input", "../working", "../temp")
MAIN = "__main__.py"
LARGEST_FOLDER = 100_000_000  # bytes after which no more of its files are listed: more than anybody carries


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
    """What a program needs beside it. The others are names with the place that names them: `missing` is nowhere,
    `outside` lies outside of the folder and cannot be found by the same path elsewhere, and `unsure` are paths of data
    that are not there, which the program may read, or make itself."""

    files: tuple[NeededFile, ...]
    missing: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()

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
    with _readable():
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
    own = own or folder
    file = os.path.relpath(own / Path(name).name, folder)
    program = of_script(script, name, file=file)
    for before, word in zip(["", *args], map(str, args), strict=False):
        program.see_word(word, str(before), f"the argument {word}")
    with _readable():
        walk = _Walk(folder, there)
        walk.add(program, own)
        return walk.result()


@contextmanager
def _readable() -> Iterator[None]:
    """Raises LabError for files that cannot be read."""
    try:
        yield
    except OSError as error:
        raise LabError(f"{error.filename} is needed and cannot be read: {error.strerror}") from None


@dataclass
class _Walk:
    """Follows programs in the order in which they run. `folder` is where they do, `places` are others to which they
    change, `search` where their modules may be. `files` are found so far, by name; `texts` are of cells that write
    programs, until they are followed; `made` are paths that programs write before they read them. Modules are followed
    after all scripts, as they may be deeply nested, and files at last, when it is known what writes them."""

    folder: Path
    there: Collection[str]
    installed: Collection[str] = ()
    files: dict[str, NeededFile] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)  # modules
    absent: list[Mention] = field(default_factory=list)  # files that are surely read, and not there
    doubted: dict[str, str] = field(default_factory=dict)  # files that may be read, and are not there
    programs: list[Program] = field(default_factory=list)
    places: list[Path] = field(default_factory=list)
    search: list[Path] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    made_modules: set[str] = field(default_factory=set)
    outputs: dict[Path, bool] = field(default_factory=dict)  # whether a folder is of a run, by path
    has_run: bool = False  # another program, which may have made files
    modules: list[tuple[Program, Path, tuple[str, ...], bool]] = field(default_factory=list)  # the last is `has_run`
    others: list[tuple[Mention, Path, bool]] = field(default_factory=list)
    followed: set[Path | tuple[str, bool]] = field(default_factory=set)  # modules, packages, programs and if it is sure

    def add(self, program: Program, own: Path, package: tuple[str, ...] = ()) -> None:
        """A program whose modules are first looked for in `own`; of a module, `package` is what holds it."""
        self.programs.append(program)
        self.texts |= program.writes
        self.made |= (made := {*program.writes, *_made_first(program)})
        self.made_modules |= _modules(made)
        self.places += [self.folder / each for each in program.folders]
        search = [own, *(self.folder / each for each in program.search)]
        self.search += [each for each in search if each not in self.search]
        for mention in program.mentions:
            if mention.kind == "module":
                self._module(mention, own, package)
            elif mention.kind == "ran":
                self.has_run = True
            elif mention.name.endswith(PROGRAMS) or is_a(Path.is_file, self.folder / mention.name / MAIN):
                self._path(mention, own.joinpath(*package))
            elif mention.kind != "written":
                self.others.append((mention, own.joinpath(*package), self.has_run))
        for name in program.writes:
            self._follow_text(name)

    def _module(self, mention: Mention, own: Path, package: tuple[str, ...]) -> None:
        module, _, member = mention.name.partition(":")
        level = len(module) - len(module.lstrip("."))
        if level:
            if level > len(package):
                return
            module = ".".join([*package[: len(package) - level + 1], *filter(None, [module[level:]])])
        names = [module, f"{module}.{member}"] if member and member != "*" else [module]
        top = module.partition(".")[0]
        if not top or top in self.there or top in self.made_modules:
            return
        place = local_place(top, [own, self.folder, *self.places, *self.search], self.installed)
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
            self._read_module(each.split("."), place, base, mention)
        inner = place.joinpath(*module.split("."))
        if mention.sure and (place / top / "__init__.py").is_file() and not any(inner.parent.glob(f"{inner.name}*")):
            self.lacking.setdefault(module, mention.place)

    def _read_module(self, parts: list[str], place: Path, base: Path, mention: Mention) -> None:
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
            self.modules.append((program, base, package, self.has_run))

    def _path(self, mention: Mention, beside: Path) -> None:
        """`beside` is the folder of the program or module, in which importlib.resources looks."""
        name = mention.name
        if mention.kind == "script":
            self._follow_text(name)
        if not _is_judged(name) or name in self.there or name in self.made:
            return
        folders = [self.folder, *self.places]
        folders += [] if mention.sure or "." not in name else [beside]
        if mention.kind == "listed":
            for folder in folders:
                for path in self._listed(folder, name):
                    self._take(path, path, mention)
            return
        if not (found := [folder / name for folder in folders if is_a(Path.is_file, folder / name)]):
            self._not_a_file(mention)
        elif _is_within(found[0], self.folder):
            self._take(found[0], found[0], mention)
            self._follow(found[0], mention)
        elif mention.kind in ("script", "read") and mention.sure:
            self.outside.setdefault(name, mention.place)

    def _not_a_file(self, mention: Mention) -> None:
        path = self.folder / mention.name
        if is_a(Path.is_file, path / MAIN):  # a folder that is a program
            for file in sorted(path.rglob("*.py")):
                self._take(file, file, mention)
            self._follow(path / MAIN, mention)
            return
        is_missed = mention.kind == "script" or (mention.kind == "read" and not self.has_run)
        if glob.has_magic(mention.name) or is_a(Path.exists, path):
            return
        if is_missed and mention.sure:
            self.absent.append(mention)
        elif path.suffix in DATA:
            self.doubted.setdefault(mention.name, mention.place)

    def _follow(self, path: Path, mention: Mention) -> None:
        """What a program needs that was found. It surely runs only where it is surely run."""
        name, sure = _relative(path, self.folder), mention.kind == "script" and mention.sure
        if path.suffix in PROGRAMS and (name, sure) not in self.followed:
            self.followed.add((name, sure))
            self._read(name, path.read_bytes(), sure)

    def _follow_text(self, name: str) -> None:
        """What a program needs that a cell writes."""
        if (text := self.texts.pop(name, None)) is not None:
            self._read(name, text.encode(), True)

    def _read(self, name: str, source: bytes, sure: bool) -> None:
        if name.endswith(".py"):
            self.add(of_script(source, name, file=name, sure=sure), (self.folder / name).parent)
        elif name.endswith(".sh"):
            self.add(of_shell_script(source, name), self.folder)
        elif name.endswith(".ipynb"):
            self.add(of_notebook(source), self.folder)

    def _listed(self, folder: Path, name: str) -> Iterator[Path]:
        """The files of a folder, or of a pattern."""
        found: Iterator[Path]
        if glob.has_magic(name):
            found = folder.glob(name)
        elif is_a(Path.is_dir, folder / name):
            found = (folder / name).rglob("*")
        else:
            found = iter([folder / name])
        size = 0
        for path in found:
            if is_a(Path.is_file, path) and _is_within(path, self.folder) and not self._is_output(path):
                yield path
                if (size := size + path.stat().st_size) > LARGEST_FOLDER:
                    return

    def _is_output(self, path: Path) -> bool:
        """Whether a file or folder is of a run, or of what other tools write."""
        if path == self.folder:
            return False
        if path not in self.outputs:
            of_run = path.name in OUTPUTS or is_a(Path.is_file, path / "run.json")
            self.outputs[path] = of_run or self._is_output(path.parent)
        return self.outputs[path]

    def _take(self, path: Path, target: Path, mention: Mention) -> None:
        name = _relative(target, self.folder)
        if name not in self.files and name not in self.there:
            self.files[name] = NeededFile(path, name, path.stat().st_size, mention.place)

    def result(self) -> Needs:
        for program, own, package, has_run in self.modules:  # which grows meanwhile
            self.has_run = has_run
            self.add(program, own, package)
        for mention, beside, has_run in self.others:
            self.has_run = has_run
            self._path(mention, beside)
        mentions = [mention for program in self.programs for mention in program.mentions]
        made = self.made | {mention.name for mention in mentions if mention.kind in ("written", "passed", "listed")}
        modules, installs = _modules(made), any(program.installs for program in self.programs)
        missing = {
            f"{name} (imported in {place})": place
            for name, place in self.lacking.items()
            if not installs and name not in modules
        }
        if not any(program.moves or program.makes for program in self.programs):
            for mention in self.absent:
                if not any(_makes_file(name, mention.name) for name in made):
                    missing.setdefault(f"{mention.name} ({mention.place})", mention.place)
        outside = tuple(f"{name} ({place})" for name, place in self.outside.items())
        written = self.made | {mention.name for mention in mentions if mention.kind == "written"}
        unsure = [f"{name} ({place})" for name, place in self.doubted.items() if name not in written]
        return Needs(tuple(self.files.values()), tuple(missing), outside, tuple(unsure))


def _made_first(program: Program) -> Iterator[str]:
    """The paths that a program writes, unless it surely reads them before."""
    first: dict[str, Mention] = {}
    for mention in program.mentions:
        if mention.kind in ("read", "written"):
            earliest = first.setdefault(mention.name, mention)
            if mention.kind == "written" and not (earliest.kind == "read" and earliest.sure):
                yield mention.name


def _makes_file(made: str, name: str) -> bool:
    """Whether a path that may have been made is that of a file, or of a folder that it is in."""
    return name == made or name.startswith((f"{made}/", f"{made}.")) or made == "."


def _modules(made: Collection[str]) -> set[str]:
    """The modules and packages that paths may be those of, or are in."""
    return {part.partition(".")[0] for name in made for part in name.split("/")}


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
    return Path(_relative(path, folder)).parts[:1] != ("..",)
