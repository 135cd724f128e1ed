"""Reads which modules and paths a program names, without running it. What is computed is not named."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from labkit.checking import python_of_cell
from labkit.files import decoded

Kind = Literal["module", "script", "ran", "read", "listed", "named", "passed", "written"]
"""What a program does with a name: imports it, runs it, has run it and maybe others, reads it, lists its files, only
holds it, passes it to a function that may read or make it, writes it."""

STARTS = {"launch", "sweep", "submit", "run_path"}
LAUNCHES = {"plan", "check", "diff"} | STARTS
# Their mode is the second argument.
OPENS = re.compile(r"((io|os|codecs|gzip|bz2|lzma|tarfile)\.)?open|h5py\.File|(zipfile\.)?ZipFile|(np|numpy)\.memmap")
READS = re.compile(
    r"(read|scan)_\w+|(np|numpy|torch|jit|joblib|torchaudio|OmegaConf)\.load|loadtxt|genfromtxt|fromfile|imread"
    r"|load_file|safe_open|(sf|soundfile|wavfile|io)\.read|copy2?|copyfile"
)
LISTS = {"listdir", "scandir", "walk", "ImageFolder", "DatasetFolder", "from_pretrained", "load_from_disk", "copytree"}
GLOBS = {"glob", "iglob", "glob.glob", "glob.iglob"}
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
SHELLS_OUT = re.compile(r"(os)?\.?system|(subprocess\.)?(run|call|check_call|check_output|Popen)")
EXTRACTS = {"extractall", "unpack_archive"}
# Commands that make no files. Any other, such as git or tar, may.
MAKES_NONE = re.compile(
    r"ls|pwd|cat|head|tail|echo|printf|wc|grep|find|tree|du|df|free|nproc|nvidia-smi|lscpu|uname|which|env|export|date"
    r"|sleep|rm|true|set|cd|mkdir|pip3?|uv|conda|mamba"
)
PIP = re.compile(r"\b(pip3?|uv|conda|mamba)\b.*\binstall\b")
RUNS = re.compile(r"python[\d.]*|torchrun|ipython|bash|sh|accelerate|deepspeed|source|papermill|labkit|\.")
PROGRAMS = (".py", ".sh", ".ipynb")
SHELL_CELL = re.compile(r"%%(bash|sh|script|!)")
WRITTEN_CELL = re.compile(r'%%(?:writefile|file)\s+(?:-a\s+)?("[^"{$]+"|[^\s{$]+)\s*$')
PYTHON_CELL = re.compile(r"%%ranks?\b")  # labkit's
COMMAND = "command_of_a_cell"  # a function of this name stands for a line that is not Python
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
    search: list[str] = field(default_factory=list)  # folders that it adds to sys.path or PYTHONPATH
    folders: list[str] = field(default_factory=list)  # to which it changes
    makes: bool = False  # files may appear while it runs, of any name
    moves: bool = False  # it changes its folder
    installs: bool = False  # packages may appear, or it changes where they are looked for

    def see(self, kind: Kind, name: str, place: str, sure: bool = False) -> None:
        if name and len(name) <= LONGEST and "\n" not in name and "\0" not in name and "://" not in name:
            self.mentions.append(Mention(kind, name if kind == "module" else os.path.normpath(name), place, sure))

    def see_word(self, word: str, before: str, place: str) -> None:
        """A word of a command and the word before it: it may be a path, or an option with one."""
        option, _, value = word.partition("=") if word.startswith("-") else (before, "", word)
        self.see("listed" if _is_of_data(option) else "named", value, place)

    def search_in(self, path: str) -> None:
        """The folders of a PYTHONPATH."""
        self.installs = True
        self.search += [folder for folder in path.split(os.pathsep) if folder and "$" not in folder]

    def change_to(self, folder: str | None) -> None:
        """None for one that is computed."""
        self.moves = True
        self.folders += [folder] if folder else []


def of_script(source: bytes, name: str, *, file: str, is_module: bool = False, sure: bool = True) -> Program:
    """What a script or an imported module names; nothing if it is not Python, which its run will say. Which of a
    module's functions are called is not known. `sure`: it always runs."""
    program = Program()
    try:
        tree = ast.parse(decoded(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return program
    program.installs = b"sys.path" in source
    places = [f"{name}, line {line}" for line in range(1, source.count(b"\n") + 3)]
    _Reader(program, places, file, is_module).read(tree, sure)
    return program


def of_shell_script(source: bytes, name: str) -> Program:
    """What the lines of a shell's script name."""
    program = Program()
    for number, line in enumerate(source.decode("utf-8", "replace").replace("\\\n", " ").split("\n"), 1):
        _read_command(program, line, f"{name}, line {number}", sure=False)
    return program


def of_notebook(source: bytes) -> Program:
    """What the code cells of a notebook's file name; nothing if it is not a notebook."""
    try:
        cells = [cell["source"] for cell in json.loads(source)["cells"] if cell["cell_type"] == "code"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return Program()
    return of_cells(["".join(cell) for cell in cells])


def of_cells(cells: Sequence[str]) -> Program:
    """What a notebook's code cells name, also in their magics and commands."""
    program = Program()
    python: list[str] = []
    places: list[str] = []
    commands: list[dict[str, str]] = []  # lines that are not Python, by place
    for number, cell in enumerate(cells, 1):
        lines = _joined(cell.split("\n"))
        if PYTHON_CELL.match(lines[0]):
            lines[0] = "pass"
        if written := WRITTEN_CELL.match(lines[0]):
            program.writes[os.path.normpath(written[1].strip("\"'"))] = "\n".join(lines[1:])
        elif SHELL_CELL.match(lines[0]):
            commands.append({f"cell {number}, line {at}": f"!{line}" for at, line in enumerate(lines[1:], 2)})
            python.append(f"{COMMAND}({len(commands) - 1})")
            places.append(f"cell {number}, line 1")
        elif (known := python_of_cell(lines)) is not None:
            for at, (line, plain) in enumerate(zip(lines, known, strict=False), 1):
                if line != plain:
                    commands.append({f"cell {number}, line {at}": line.partition("=")[2] if "=" in plain else line})
                    known[at - 1] = re.sub("(pass|None)$", f"{COMMAND}({len(commands) - 1})", plain)
            python += known
            places += [f"cell {number}, line {at}" for at in range(1, len(known) + 1)]
    try:
        tree = ast.parse("\n".join(python))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return program
    program.installs |= any("sys.path" in line for line in python)
    _Reader(program, places, "", False, commands).read(tree, sure=True)
    return program


def _joined(lines: list[str]) -> list[str]:
    """The lines, with a command that continues on the next lines on its first."""
    lines = [*lines]
    for at in range(len(lines) - 2, -1, -1):
        if lines[at].lstrip().startswith(("!", "%")) and lines[at].endswith("\\"):
            lines[at], lines[at + 1] = lines[at][:-1] + " " + lines[at + 1], ""
    return lines


def _read_magic(program: Program, line: str, place: str, sure: bool) -> None:
    line = line.strip()
    if line.startswith("!"):
        _read_command(program, line.lstrip("!"), place, sure)
    elif line.startswith(("%pip", "%conda", "%mamba", "%uv")):
        _read_command(program, line.lstrip("%"), place, sure)
    elif line.startswith(("%cd", "%pushd")):
        program.change_to(line.partition(" ")[2].strip(" \"'"))
    elif line.startswith("%env"):
        _read_command(program, "export " + line.removeprefix("%env"), place, sure)
    elif line.startswith("%run"):
        _read_command(program, "python " + line.removeprefix("%run"), place, sure)
    elif line.startswith(("%load_ext", "%aimport")):
        program.see("module", line.split()[-1], place)


def _read_command(program: Program, line: str, place: str, sure: bool) -> None:
    """A line for a shell: what it runs, and the files that its words name."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = [*lexer]
    except ValueError:  # quotes that do not match
        words = line.split()
    command: list[str] = []
    for word in [*words, ";"]:
        if set(word) <= set("&;|()"):
            _read_words(program, command, place, sure)
            command = []
        else:
            command.append(word)


def _read_words(program: Program, words: list[str], place: str, sure: bool) -> None:
    """A command without those before and after it in the line."""
    for word in words:
        if word.startswith("PYTHONPATH="):
            program.search_in(word.partition("=")[2])
    head = next((word for word in words if not re.match(r"\w+=", word)), "")
    if head == "cd":
        program.change_to(words[-1] if len(words) > 1 and "$" not in words[-1] else None)
        return
    program.installs |= bool(PIP.search(" ".join(words)))
    runner = next((i for i, word in enumerate(words) if RUNS.fullmatch(word.rpartition("/")[2])), None)
    if runner is None:
        program.makes |= bool(head) and not MAKES_NONE.fullmatch(head)
    elif words[runner] in ("bash", "sh") and words[runner + 1 : runner + 2] == ["-c"]:
        _read_command(program, " ".join(words[runner + 2 : runner + 3]), place, sure)
        return
    befores = ["", *words]
    script = next((i for i, word in enumerate(words) if word.endswith(PROGRAMS) and befores[i][:1] != ">"), None)
    for number, (before, word) in enumerate(zip(befores, words, strict=False)):
        if "{" in word or "$" in word:  # a variable's value
            continue
        if number == script and runner is not None and runner < number:
            program.see("script", word, place, sure)
        elif before == "-m" and runner is not None and not PIP.search(" ".join(words)):
            program.see("module", word, place)
        elif set(before) == {">"}:
            program.see("written", word, place)
        else:
            program.see_word(word, before, place)
    if runner is not None:
        program.see("ran", words[runner], place)


def _is_of_data(name: str | None) -> bool:
    """Whether the folder that an option or a keyword of this name has is probably one with data."""
    return OF_DATA.fullmatch((name or "").strip("-").replace("-", "_")) is not None


Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Scope: TypeAlias = dict[str, list[tuple[int, ast.expr | None]]]
"""The values that names are bound to, with the line; None for a value that is not an expression of its own."""


class _Reader:
    """Walks through a program, in the order in which it runs."""

    def __init__(
        self,
        program: Program,
        places: Sequence[str],
        file: str,
        is_module: bool,
        commands: Sequence[Mapping[str, str]] = (),
    ):
        self.program, self.places, self.file, self.is_module = program, places, file, is_module
        self.commands = commands
        self.scopes: list[Scope] = []
        self.functions: dict[str, tuple[Function, list[Scope]]] = {}  # not called so far, with what they see

    def read(self, tree: ast.Module, sure: bool) -> None:
        self.scopes = [_bindings(tree.body)]
        self._block(tree.body, sure)
        while self.functions:
            self._called_by_name(next(iter(self.functions)), False)

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
                for each in ast.walk(test):  # what follows may depend on whether it is there
                    if isinstance(each, ast.Constant) and isinstance(each.value, str):
                        self._see("passed", each.value, node)
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
                self.functions[node.name] = (node, [*self.scopes])
            case ast.ClassDef(body=body):
                for statement in _without_docstring(body):
                    self._node(statement, sure)
                    if isinstance(statement, Function):  # a method, which is not called by its bare name
                        self._called_by_name(statement.name, False)
            case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value="PYTHONPATH"))], value=value):
                self.program.search_in(self._path(value) or "")
            case ast.AugAssign(target=ast.Attribute() as target, value=ast.List(elts=elts)) if (
                _dotted(target) == "sys.path"
            ):
                self.program.search += filter(None, map(self._path, elts))
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.expr():
                self._expression(node, sure)
            case ast.While() | ast.For() | ast.Match():
                self._block([*ast.iter_child_nodes(node)], sure and isinstance(node, ast.For))
            case _:
                self._block([*ast.iter_child_nodes(node)], sure)

    def _called_by_name(self, name: str, sure: bool) -> None:
        """Walk through the body of a function where its name is first used, as if it were called there."""
        if name not in self.functions:
            return
        function, seen = self.functions.pop(name)
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        parameters: Scope = {argument.arg: [(0, None)] for argument in arguments}
        scopes, self.scopes = self.scopes, [*seen, _bindings(function.body) | parameters]
        self._block(_without_docstring(function.body), sure and not self.is_module)
        self.scopes = scopes

    def _expression(self, node: ast.AST, sure: bool) -> None:
        if isinstance(node, ast.Call):
            self._call(node, sure)
        elif isinstance(node, ast.Name):
            self._called_by_name(node.id, sure)
        elif isinstance(node, ast.IfExp | ast.BoolOp | ast.Lambda):
            for child in ast.iter_child_nodes(node):
                self._expression(child, False)
        elif (path := self._path(node)) is not None:
            self._see("named", path.rpartition("=")[2] if path.startswith("--") else path, node)
        elif isinstance(node, ast.List | ast.Tuple):
            self._words(node, sure)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "PYTHONPATH":
                    self.program.search_in(self._path(value) or "")
            for child in ast.iter_child_nodes(node):
                self._expression(child, sure)
        else:
            for child in ast.iter_child_nodes(node):
                self._expression(child, sure)

    def _words(self, node: ast.List | ast.Tuple, sure: bool) -> None:
        """A list, which may be one of a command's words."""
        before = ""
        for each in node.elts:
            word = self._path(each)
            if word is None:
                self._expression(each, sure)
            else:
                self.program.see_word(word, before, self.places[each.lineno - 1])
            before = word or ""

    def _call(self, call: ast.Call, sure: bool) -> None:
        full = _dotted(call.func)
        name, first = full.rpartition(".")[2], call.args[0] if call.args else None
        if full == COMMAND and isinstance(first, ast.Constant):
            for place, line in self.commands[int(str(first.value))].items():
                _read_magic(self.program, line, place, sure)
            return
        if full in ("sys.path.append", "sys.path.insert"):
            if (added := self._path(call.args[-1] if call.args else None)) is not None:
                self.program.search.append(added)
            return
        if SHELLS_OUT.fullmatch(full):
            if line := self._line(first):
                _read_command(self.program, line, self.places[call.lineno - 1], sure)
                return
            self.program.makes = True
        if name in ("import_module", "run_module") and isinstance(first, ast.Constant):
            self._see("module", str(first.value), call)
        if name == "chdir":
            self.program.change_to(self._path(first))
        self.program.makes |= name in EXTRACTS and not any(map(self._path, call.args))
        if isinstance(call.func, ast.Attribute):
            self._receiver(call.func.value, name, call, sure)
        if (path := self._path(call)) is not None:  # Path("data", "x.csv")
            self._see("named", path, call)
            return
        for number, argument in enumerate(call.args):
            self._argument(full, number, argument, call, sure)
        if isinstance(call.func, ast.Name):
            self._called_by_name(call.func.id, sure)
        for keyword in call.keywords:
            if (path := self._path(keyword.value)) is None:
                self._expression(keyword.value, sure)
            elif keyword.arg == "module" and name in STARTS:
                self._see("module", path, call)
            elif keyword.arg in FIRST:
                self._argument(full, 0, keyword.value, call, sure)
            else:
                option = self._path(first) if name == "add_argument" and keyword.arg == "default" else keyword.arg
                is_listed = _is_of_data(option) and not any(k.arg == "download" for k in call.keywords)
                self._see("listed" if is_listed else "passed", path, call)
        if name in STARTS:
            self._see("ran", name, call)

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
        if number == 0 and path.endswith(PROGRAMS) and (name in LAUNCHES or full.endswith("Script.load")):
            self._see("script", path, call, sure)
        elif number == 0 and OPENS.fullmatch(full):
            self._see("written" if _writes(call, 1) else "read", path, call, sure)
        elif number == 0 and (name in LISTS or full in GLOBS):
            self._see("listed", path, call)
        elif number == 0 and (full.endswith("Image.open") or READS.fullmatch(name) or READS.fullmatch(full)):
            self._see("read", path, call, sure)
        elif WRITES.fullmatch(name) or (name in WRITES_SECOND and number == 1):
            self._see("written", path, call)
        else:
            self._see("named" if HOLDS.fullmatch(name) else "passed", path, call)

    def _line(self, node: ast.expr | None) -> str:
        """A command as one line: its words may be a list. What is computed becomes `$`."""
        if isinstance(node, ast.List | ast.Tuple):
            words = ["python" if _dotted(each) == "sys.executable" else self._path(each) for each in node.elts]
            return shlex.join(word if word is not None else "$" for word in words)
        if isinstance(node, ast.JoinedStr):
            return "".join(self._text(each, 0) or "$" for each in node.values)
        return self._text(node, 0) or ""

    def _has_one_value(self, node: ast.expr) -> bool:
        """Whether the names in an expression have a single value."""
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
        return all(len(scope[name]) == 1 for name in names for scope in self.scopes if name in scope)

    def _path(self, node: ast.AST | None) -> str | None:
        """The path that an expression is, or None if it is not one, or computed."""
        text = self._text(node, 0)
        return text or None

    def _text(self, node: ast.AST | None, depth: int) -> str | None:
        if depth > 8:
            return None
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.FormattedValue(value=value):
                return self._text(value, depth)
            case ast.Name(id="__file__"):
                return self.file or None
            case ast.Name(id=name):
                return self._value(name, node.lineno, depth)
            case ast.JoinedStr(values=values):
                parts = [self._text(value, depth + 1) for value in values]
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
