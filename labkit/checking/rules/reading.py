"""Rules about files that one rank writes or downloads and the others read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.collectives import agrees, collective
from labkit.checking.syntax.flow import callee
from labkit.checking.syntax.nodes import argument_at, is_method_call, keyword, last_part, method_of, position
from labkit.checking.syntax.ranks import guards, may_depend_on_rank, names_rank, runs_before_ranks
from labkit.checking.syntax.tree import Tree

# The argument that is the path.
WRITES = {"torch.save": 1, "numpy.save": 0, "numpy.savez": 0, "safetensors.torch.save_file": 1}
READS = {"torch.load": 0, "numpy.load": 0, "safetensors.torch.load_file": 0, "datasets.load_from_disk": 0}
WRITING = {"save_pretrained", "save_to_disk", "to_csv", "to_parquet"}
READING = {"from_pretrained", "load_from_disk", "read_csv", "read_parquet"}
WAITS = re.compile(r"barrier|wait|sync|join|fit|train$|backward", re.IGNORECASE)
# Functions and methods that surely wait for no other rank.
QUIET = re.compile(
    r"^(torch|numpy|os|json|pickle|math|time|random|logging|logger|log|pathlib|shutil|pandas|safetensors)\."
    r"|^(print|open|len|str|int|float|dict|list|tuple|set|range|sum|min|max|round|Path|isinstance)$"
    r"|\.(eval|train|to|cuda|cpu|load_state_dict|state_dict|parameters|info|debug|warning|exists|items|get|append|step"
    r"|zero_grad|format|item|detach|from_pretrained|save_pretrained)$"
)


@rule(
    "LK078 wrong",
    why="The other ranks do not wait for rank 0 to write the file: they read one that is missing, half written, or "
    "left by an earlier run. A barrier before the writing does not help. So it is with a file that rank 0 removes.",
    fix="Call dist.barrier() on every rank after rank 0 has written the file, and before any rank reads it; "
    "and once more before rank 0 removes it.",
    misses="a file that another function writes, and paths that are spelled in two ways.",
)
def read_before_written(tree: Tree) -> Mistakes:
    has_ranks = tree.is_distributed or "accelerate" in tree.words
    files = [(call, *file) for call in tree.calls if (file := _file(tree, call))] if has_ranks else []
    written = [(call, path) for call, writes, path in files if writes and _is_of_first(tree, call)]
    for call, writes, path in files:
        if writes or any(guard.ranks == "first" and not guard.may_pass_all for guard in guards(tree, call)):
            continue
        for writing, same in reversed(written):
            if same == path and _follows(tree, writing, call) and not any(_between(tree, writing, call)):
                yield call, f"no rank waits until rank 0 has written {path} ({tree.location(writing.lineno)})"
                break
        for removal in _removals(tree, path):
            if _is_of_first(tree, removal) and _follows(tree, call, removal) and not any(_between(tree, call, removal)):
                yield removal, f"rank 0 does not wait until all ranks have read {path} ({tree.location(call.lineno)})"


def _removals(tree: Tree, path: str) -> list[ast.Call]:
    calls = tree.calls_to("os.remove", "os.unlink", "shutil.rmtree")
    return [call for call in calls if call.args and ast.unparse(call.args[0]) == path]


def _file(tree: Tree, call: ast.Call) -> tuple[bool, str] | None:
    """Whether a call writes a file or reads it, and the file's path as text."""
    name = tree.called(call)
    method = method_of(call)
    if name == "open":
        mode = argument_at(call, 1, "mode")
        writes, at = isinstance(mode, ast.Constant) and bool(set("wxa") & set(str(mode.value))), 0
        if mode is not None and not isinstance(mode, ast.Constant):
            return None
    elif name in WRITES or name in READS:
        writes, at = name in WRITES, WRITES.get(name, READS.get(name, 0))
    elif method in WRITING or method in READING:
        writes, at = method in WRITING, 0
    elif is_method_call(call, "write_text", "write_bytes", "read_text", "read_bytes"):
        return method.startswith("write"), ast.unparse(call.func.value)
    else:
        return None
    if len(call.args) <= at or names_rank(tree, call.args[at]):
        return None
    return writes, ast.unparse(call.args[at])


def _is_of_first(tree: Tree, call: ast.Call) -> bool:
    around = guards(tree, call)
    return bool(around) and all(guard.ranks == "first" and not guard.may_pass_all for guard in around)


def _follows(tree: Tree, first: ast.Call, second: ast.Call) -> bool:
    """Whether a call of one rank may come after another of the same function by another rank, and not instead of it."""
    if tree.function_of(first) is not tree.function_of(second) or position(first) >= position(second):
        return False
    ways = dict(tree.branches_of(first))
    parted = [node for node, body in tree.branches_of(second) if ways.get(node, body) != body]
    return all(names_rank(tree, node.test) for node in parted)


def _between(tree: Tree, first: ast.Call, second: ast.Call) -> Iterator[bool]:
    """Whether each call between two is one that may wait for the other ranks."""
    for call in tree.calls:
        is_here = tree.function_of(call) is tree.function_of(first) and not tree.is_in(call, first, second)
        if is_here and position(first) < position(call) < position(second):
            yield _may_wait(tree, call)


def _may_wait(tree: Tree, call: ast.Call) -> bool:
    name = tree.called(call) or f".{method_of(call)}"
    function = callee(tree, call)
    if function:
        inner = tree.calls_in(function)
        return any(agrees(tree, c) or WAITS.search(ast.unparse(c.func)) for c in inner)
    return agrees(tree, call) or bool(tree.wrapping(call.func)) or not QUIET.search(name)


@rule(
    "LK010 wrong",
    why="Ranks that download into the same folder at the same time overwrite each other's files, and a rank that does "
    "not wait for the download may read a partial file.",
    fix="Download if rank == 0, then call dist.barrier() on every rank, then open the data set on every rank without "
    "download=True. With several hosts, use LOCAL_RANK instead.",
    misses="downloads other than download=True, urlretrieve or download_url_to_file, such as those of libraries, most "
    "of which lock their files; a barrier in the wrong place.",
)
def download_race(tree: Tree) -> Mistakes:
    if not tree.joins or tree.is_managed:
        return
    held_back = any(guards(tree, call) for call in tree.torch_calls("barrier", "monitored_barrier"))
    for call in tree.calls:
        last = last_part(tree.called(call))
        if not (tree.is_true(keyword(call, "download")) or last in ("urlretrieve", "download_url_to_file")):
            continue
        if runs_before_ranks(tree, call) or any("lock" in ast.unparse(each).lower() for each in tree.contexts_of(call)):
            continue
        if not may_depend_on_rank(tree, call):
            if not held_back:
                yield call, "every rank downloads into the same folder at the same time"
        elif guards(tree, call) and not _waited_for(tree, call):
            yield call, "the other ranks do not wait for this download"


def _waited_for(tree: Tree, download: ast.Call) -> bool:
    """Whether all ranks synchronize before they open the download; anywhere in the file, if the opening is unknown."""
    same = [call for call in tree.calls_to(tree.called(download)) if _follows(tree, download, call)]
    opened = next((call for call in same if not guards(tree, call)), None)
    if opened is None:
        return any(collective(tree, call) for call in tree.calls)
    return any(_between(tree, download, opened))
