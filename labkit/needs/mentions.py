"""Reads which modules and paths a program names, without running it. What is computed is not named."""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from labkit.checking import python_of_cell
from labkit.files import decoded

Kind = Literal["module", "script", "read", "listed", "named", "passed", "written"]
"""What a program does with a name: imports it, runs it, reads it, lists its files, only holds it, passes it to a
function that may read or make it, writes it."""

LAUNCHES = {"launch", "sweep", "plan", "check", "submit", "diff", "run_path"}
# Their mode is the second argument.
OPENS = re.compile(r"((io|os|codecs|gzip|bz2|lzma|tarfile)\.)?open|h5py\.File|(zipfile\.)?ZipFile|(np|numpy)\.memmap")
READS = re.compile(
    r"(read|scan)_\w+|(np|numpy|torch|jit|joblib|torchaudio|OmegaConf)\.load|loadtxt|genfromtxt|fromfile|imread"
    r"|load_file|safe_open|(sf|soundfile|wavfile|io)\.read|copy2?|copyfile"
)
LISTS = {"listdir", "scandir", "walk", "ImageFolder", "DatasetFolder", "from_pretrained", "load_from_disk", "copytree"}
OF_DATA = re.compile(r"root|(data|dataset|input|config)_?(dir|path|root|folder|files)")
FIRST = {"file", "filename", "path", "filepath_or_buffer", "fp", "f"}  # keywords of what readers take first
# They neither read nor make the file of a path.
HOLDS = re.compile(
    r"joinpath|with_\w+|relative_to|resolve|absolute|as_posix|as_uri|expanduser|\w*Path|join|abspath|realpath|normpath"
    r"|fspath|str|print|format|startswith|endswith|is_relative_to|append|insert|extend|add_argument|sorted|list|tuple"
)
WRITES = re.compile(
    r"(save|write|dump|export)\w*|to_\w+|tofile|mkdir|makedirs|touch|unlink|remove|rmtree|\w*[hH]andler|\w*Writer"
)
WRITES_SECOND = {"copy", "copy2", "copyfile", "copytree", "move", "urlretrieve", "rename", "replace"}
SHELLS_OUT = re.compile(r"(os\.)?system|(subprocess\.)?(run|call|check_call|check_output|Popen)")
DOWNLOADS = re.compile(
    r"\b(git|wget|curl|unzip|tar|gdown|kaggle|cp|mv|ln|gsutil|gcloud|aws|hf|huggingface-cli|make|rsync|scp|dvc)\b"
)
PIP = re.compile(r"\b(pip3?|uv|conda|mamba)\b.*\binstall\b")
RUNS = re.compile(r"python[\d.]*|torchrun|ipython|bash|sh|accelerate|deepspeed|source|\.")
SHELL_CELL = re.compile(r"%%(bash|sh|script|!)")
WRITTEN_CELL = re.compile(r"%%(?:writefile|file)\s+(?:-a\s+)?(\S+)")
PYTHON_CELL = re.compile(r"%%ranks?\b")  # labkit's
LONGEST = 255  # characters of a path


@dataclass(frozen=True)
class Mention:
    """A name in a program: a module's with dots before it if it is relative, or a path, relative to the folder in
    which the program runs. `sure`: this is done whenever the program runs."""

    kind: Kind
    name: str
    place: str
    sure: bool = False


@dataclass
class Program:
    """A program's text, with what it says about where things come from. `file` is its `__file__`, relative to the
    folder in which it runs; "" in a notebook."""

    mentions: list[Mention] = field(default_factory=list)
    writes: dict[str, str] = field(default_factory=dict)  # texts that cells write, by path
    search: list[str] = field(default_factory=list)  # folders that it adds to sys.path
    downloads: bool = False  # files may come from elsewhere while it runs
    moves: bool = False  # it changes its folder
    installs: bool = False  # packages may, or it changes where they are looked for

    def see(self, kind: Kind, name: str, place: str, sure: bool = False) -> None:
        if name and len(name) <= LONGEST and "\n" not in name and "\0" not in name and "://" not in name:
            self.mentions.append(Mention(kind, name, place, sure))


def of_script(source: bytes, name: str, *, file: str, is_module: bool = False, sure: bool = True) -> Program:
    """What a script or an imported module names; nothing if it is not Python, which its run will say. Which of a
    module's functions are called is not known. `sure`: it always runs."""
    program = Program()
    try:
        tree = ast.parse(decoded(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return program
    places = [f"{name}, line {line}" for line in range(1, source.count(b"\n") + 3)]
    _Reader(program, places, file, is_module).read(tree, sure)
    return program


def of_shell_script(source: bytes, name: str) -> Program:
    """What the lines of a shell's script name."""
    program = Program()
    for number, line in enumerate(source.decode("utf-8", "replace").replace("\\\n", " ").split("\n"), 1):
        _read_command(program, line, f"{name}, line {number}", sure=False)
    return program


def of_cells(cells: Sequence[str]) -> Program:
    """What a notebook's code cells name, also in their magics and commands."""
    program = Program()
    python: list[str] = []
    places: list[str] = []
    for number, cell in enumerate(cells, 1):
        lines = _joined(cell.split("\n"))
        if PYTHON_CELL.match(lines[0]):
            lines[0] = "pass"
        if written := WRITTEN_CELL.match(lines[0]):
            program.writes[os.path.normpath(written[1].strip("\"'"))] = "\n".join(lines[1:])
        elif SHELL_CELL.match(lines[0]):
            for at, line in enumerate(lines[1:], 2):
                _read_command(program, line, f"cell {number}, line {at}")
        elif (known := python_of_cell(lines)) is not None:
            for at, (line, plain) in enumerate(zip(lines, known, strict=False), 1):
                if line != plain:
                    _read_magic(program, line.partition("=")[2] if "=" in plain else line, f"cell {number}, line {at}")
            python += known
            places += [f"cell {number}, line {at}" for at in range(1, len(known) + 1)]
    try:
        tree = ast.parse("\n".join(python))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return program
    _Reader(program, places, "", False).read(tree, sure=True)
    return program


def _joined(lines: list[str]) -> list[str]:
    """The lines, with a command that continues on the next lines on its first."""
    lines = [*lines]
    for at in range(len(lines) - 2, -1, -1):
        if lines[at].lstrip().startswith(("!", "%")) and lines[at].endswith("\\"):
            lines[at], lines[at + 1] = lines[at][:-1] + " " + lines[at + 1], ""
    return lines


def _read_magic(program: Program, line: str, place: str) -> None:
    line = line.strip()
    if line.startswith("!"):
        _read_command(program, line.lstrip("!"), place)
    elif line.startswith(("%pip", "%conda", "%mamba", "%uv")):
        _read_command(program, line.lstrip("%"), place)
    elif line.startswith(("%cd", "%pushd")):
        program.moves = True
    elif line.startswith("%run"):
        _read_command(program, "python " + line.removeprefix("%run"), place)
    elif line.startswith(("%load_ext", "%aimport")):
        program.see("module", line.split()[-1], place)


def _read_command(program: Program, line: str, place: str, sure: bool = True) -> None:
    """A line for a shell: what it runs, and the files that its words name."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        words = line.split()
    program.installs |= bool(PIP.search(line))
    program.downloads |= bool(DOWNLOADS.search(line))
    program.moves |= "cd" in words
    runner = next((i for i, word in enumerate(words) if RUNS.fullmatch(word.rpartition("/")[2])), None)
    script = next((i for i, word in enumerate(words) if word.endswith((".py", ".sh"))), None)
    written = False
    for number, word in enumerate(words):
        if "{" in word or "$" in word:  # a variable's value
            continue
        if number == script and runner is not None and runner < number:
            program.see("script", os.path.normpath(word), place, sure)
        elif words[number - 1 : number] == ["-m"] and runner is not None and not PIP.search(line):
            program.see("module", word, place)
        else:
            path = word.rpartition("=")[2] if word.startswith("-") else word
            program.see("written" if written else "named", os.path.normpath(path.lstrip(">")), place)
        written = word in (">", ">>") or word.startswith(">")


Scope: TypeAlias = dict[str, list[tuple[int, ast.expr | None]]]
"""The values that names are bound to, with the line; None for a value that is not an expression of its own."""


class _Reader:
    """Walks through a program, in the order in which it runs."""

    def __init__(self, program: Program, places: Sequence[str], file: str, is_module: bool):
        self.program, self.places, self.file, self.is_module = program, places, file, is_module
        self.scopes: list[Scope] = []
        self.used: set[str] = set()

    def read(self, tree: ast.Module, sure: bool) -> None:
        self.used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self.program.installs |= any(_dotted(node) == "sys.path" for node in ast.walk(tree))
        self.scopes = [_bindings(tree.body)]
        self._block(tree.body, sure)

    def _see(self, kind: Kind, name: str, node: ast.AST, sure: bool = False) -> None:
        self.program.see(kind, name, self.places[min(getattr(node, "lineno", 1), len(self.places)) - 1], sure)

    def _block(self, body: Sequence[ast.AST], sure: bool) -> None:
        for node in body:
            self._node(node, sure)

    def _node(self, node: ast.AST, sure: bool) -> None:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    self._see("module", alias.name, node, sure)
            case ast.ImportFrom(module=module, names=names, level=level):
                for alias in names:
                    self._see("module", f"{'.' * level}{module or ''}:{alias.name}", node, sure)
            case ast.If(test=test, body=body, orelse=orelse):
                self._expression(test, sure)
                if "TYPE_CHECKING" not in ast.dump(test):
                    self._block(body, sure and "'__main__'" in ast.dump(test) and not self.is_module)
                self._block(orelse, False)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=finalbody):
                self._block(body, sure and not handlers)
                self._block([statement for handler in handlers for statement in handler.body], False)
                self._block(orelse, sure and not handlers)
                self._block(finalbody, sure)
            case ast.With(items=items, body=body):
                for item in items:
                    self._expression(item.context_expr, sure)
                self._block(body, sure and not any("suppress" in ast.dump(item.context_expr) for item in items))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.decorator_list]
                for default in defaults:
                    self._expression(default, False)
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                parameters: Scope = {argument.arg: [(0, None)] for argument in arguments}
                self.scopes.append(_bindings(node.body) | parameters)
                self._block(_without_docstring(node.body), sure and node.name in self.used and not self.is_module)
                self.scopes.pop()
            case ast.ClassDef():
                self._block(_without_docstring(node.body), sure)
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.expr():
                self._expression(node, sure)
            case ast.While() | ast.For() | ast.Match():
                self._block([*ast.iter_child_nodes(node)], sure and isinstance(node, ast.For))
            case _:
                self._block([*ast.iter_child_nodes(node)], sure)

    def _expression(self, node: ast.AST, sure: bool) -> None:
        if isinstance(node, ast.Call):
            self._call(node, sure)
        elif isinstance(node, ast.IfExp | ast.BoolOp | ast.Lambda):
            for child in ast.iter_child_nodes(node):
                self._expression(child, False)
        elif not isinstance(node, ast.Name) and (path := self._path(node)) is not None:
            self._see("named", path.rpartition("=")[2] if path.startswith("--") else path, node)
        else:
            for child in ast.iter_child_nodes(node):
                self._expression(child, sure)

    def _call(self, call: ast.Call, sure: bool) -> None:
        full = _dotted(call.func)
        name, first = full.rpartition(".")[2], call.args[0] if call.args else None
        if full in ("sys.path.append", "sys.path.insert"):
            if (added := self._path(call.args[-1] if call.args else None)) is not None:
                self.program.search.append(added)
            return
        if SHELLS_OUT.fullmatch(full) and (line := self._line(first)):
            _read_command(self.program, line, self.places[call.lineno - 1], sure)
            return
        if name in ("import_module", "run_module") and isinstance(first, ast.Constant):
            self._see("module", str(first.value), call)
        self.program.moves |= name == "chdir"
        if isinstance(call.func, ast.Attribute):
            self._receiver(call.func.value, name, call, sure)
        if (path := self._path(call)) is not None:  # Path("data", "x.csv")
            self._see("named", path, call)
            return
        for number, argument in enumerate(call.args):
            self._argument(full, number, argument, call, sure)
        for keyword in call.keywords:
            if (path := self._path(keyword.value)) is None:
                self._expression(keyword.value, sure)
            elif keyword.arg in FIRST:
                self._argument(full, 0, keyword.value, call, sure)
            else:
                is_listed = OF_DATA.fullmatch(keyword.arg or "") and not any(k.arg == "download" for k in call.keywords)
                self._see("listed" if is_listed else "passed", path, call)

    def _receiver(self, receiver: ast.expr, name: str, call: ast.Call, sure: bool) -> None:
        """What a method is called on, which may be a path."""
        path = None if isinstance(receiver, ast.Constant) else self._path(receiver)
        if path is None:
            self._expression(receiver, sure)
        elif name in ("read_text", "read_bytes"):
            self._see("read", path, call, sure and self._has_one_value(receiver))
        elif name == "open":
            self._see("written" if _writes(call, 0) else "read", path, call, sure and self._has_one_value(receiver))
        elif name in ("glob", "rglob") and (pattern := self._path(call.args[0] if call.args else None)):
            self._see("listed", str(Path(path, "**" if name == "rglob" else "", pattern)), call)
        elif name == "iterdir":
            self._see("listed", path, call)
        elif not HOLDS.fullmatch(name):
            self._see("written" if WRITES.fullmatch(name) else "passed", path, call)

    def _argument(self, full: str, number: int, argument: ast.expr, call: ast.Call, sure: bool) -> None:
        path, name = self._path(argument), full.rpartition(".")[2]
        if path is None:
            self._expression(argument, sure)
            return
        sure = sure and self._has_one_value(argument)
        if number == 0 and path.endswith(".py") and (name in LAUNCHES or full.endswith("Script.load")):
            self._see("script", path, call, sure)
        elif number == 0 and OPENS.fullmatch(full):
            self._see("written" if _writes(call, 1) else "read", path, call, sure)
        elif number == 0 and (name in LISTS or full in ("glob.glob", "iglob", "glob.iglob")):
            self._see("listed", path, call)
        elif number == 0 and (full.endswith("Image.open") or READS.fullmatch(name) or READS.fullmatch(full)):
            self._see("read", path, call, sure)
        elif WRITES.fullmatch(name) or (name in WRITES_SECOND and number == 1):
            self._see("written", path, call)
        else:
            self._see("named" if HOLDS.fullmatch(name) else "passed", path, call)

    def _line(self, node: ast.expr | None) -> str:
        """A command as one line: its words may be a list, of which those that are computed become `$`."""
        if isinstance(node, ast.List | ast.Tuple):
            words = ["python" if _dotted(each) == "sys.executable" else self._path(each) for each in node.elts]
            return shlex.join(word if word is not None else "$" for word in words)
        return str(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""

    def _has_one_value(self, node: ast.expr) -> bool:
        """Whether the names in an expression have a single value."""
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
        return all(len(scope[name]) == 1 for name in names for scope in self.scopes if name in scope)

    def _path(self, node: ast.AST | None) -> str | None:
        """The path that an expression is, or None if it is not one, or computed."""
        text = self._text(node, 0)
        return os.path.normpath(text) if text else None

    def _text(self, node: ast.AST | None, depth: int) -> str | None:
        if depth > 8:
            return None
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(id="__file__"):
                return self.file or None
            case ast.Name(id=name):
                return self._value(name, node.lineno, depth)
            case ast.JoinedStr(values=values):
                parts = [self._text(v.value if isinstance(v, ast.FormattedValue) else v, depth + 1) for v in values]
                return None if None in parts else "".join(filter(None, parts))
            case ast.BinOp(left=left, op=ast.Div() | ast.Add() as op, right=right):
                one, other = self._text(left, depth + 1), self._text(right, depth + 1)
                if one is None or other is None:
                    return None
                return str(Path(one, other)) if isinstance(op, ast.Div) else one + other
            case ast.Attribute(value=value, attr="parent"):
                inner = self._text(value, depth + 1)
                return None if inner is None else str(Path(inner).parent)
            case ast.Subscript(value=ast.Attribute(value=value, attr="parents"), slice=ast.Constant(value=int(up))):
                inner = self._text(value, depth + 1)
                return None if inner is None else os.path.normpath(Path(inner, *[".."] * (up + 1)))
            case ast.Call():
                return self._called(node, depth)
        return None

    def _called(self, call: ast.Call, depth: int) -> str | None:
        full = _dotted(call.func)
        name = full.rpartition(".")[2]
        if full in ("os.getcwd", "Path.cwd", "pathlib.Path.cwd") or (name == "Path" and not call.args):
            return "."
        if isinstance(call.func, ast.Attribute) and name in ("joinpath", "resolve", "absolute", "as_posix"):
            parts = [self._text(each, depth + 1) for each in (call.func.value, *call.args)]
        elif name in ("Path", "PurePath", "str", "fspath", "abspath", "realpath", "normpath") or full.endswith(
            "path.join"
        ):
            parts = [self._text(each, depth + 1) for each in call.args]
        elif name == "dirname" and len(call.args) == 1:
            inner = self._text(call.args[0], depth + 1)
            return None if inner is None else str(Path(inner).parent)
        else:
            return None
        known = [part for part in parts if part is not None]
        return str(Path(*known)) if known and len(known) == len(parts) and not call.keywords else None

    def _value(self, name: str, line: int, depth: int) -> str | None:
        """The text that a name is bound to at a line; None if one of its values is computed."""
        for scope in reversed(self.scopes):
            if name in scope:
                if any(value is None for _, value in scope[name]):
                    return None
                before = [value for at, value in scope[name] if at < line or scope is not self.scopes[-1]]
                return self._text(before[-1], depth + 1) if before else None
        return None


def _bindings(body: Sequence[ast.stmt]) -> Scope:
    """What the names of a module or function are bound to by its own statements."""
    scope: Scope = {}

    def bind(target: ast.expr, value: ast.expr | None) -> None:
        for each in ast.walk(target):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                scope.setdefault(each.id, []).append((each.lineno, value if each is target else None))

    def look(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            return
        if isinstance(node, ast.Assign):
            for target in node.targets:
                bind(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            bind(node.target, node.value)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            scope.setdefault(node.id, []).append((node.lineno, None))
        if isinstance(node, ast.Assign | ast.AnnAssign):
            look(node.value) if node.value is not None else None
            return
        for child in ast.iter_child_nodes(node):
            look(child)

    for statement in body:
        look(statement)
    return scope


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    return [
        statement
        for statement in body
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]


def _dotted(node: ast.AST) -> str:
    """`torch.jit.load` of a function; `.load` if what it belongs to is no name."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _writes(call: ast.Call, position: int) -> bool:
    """Whether a call opens a file to write it; also if its mode is computed."""
    modes: Iterator[ast.expr] = (keyword.value for keyword in call.keywords if keyword.arg == "mode")
    mode = next(modes, call.args[position] if len(call.args) > position else ast.Constant("r"))
    return not isinstance(mode, ast.Constant) or not isinstance(mode.value, str) or bool(set(mode.value) & set("wxa"))
