"""Warns before a launch, in a few lines, and never with an error of the checker itself."""

from __future__ import annotations

import ast
import os
import shlex
import sys
from pathlib import Path

from labkit.checking.checker import check
from labkit.checking.source import read
from labkit.checking.syntax.nodes import keyword
from labkit.checking.syntax.tree import tree_of
from labkit.text import plain
from labkit.write import Script, has_main_guard, is_library, script_names

__all__ = ["warn"]

MOST_LINES = 5
MOST_BYTES = 200_000  # checking takes about 10 ms per 1,000 lines; it must not delay a launch
KINDS = ("hangs", "wrong")


def warn(script: Script | str | os.PathLike[str]) -> None:
    """Warn on stderr about mistakes in the user's own script that may hang or corrupt training."""
    try:
        text = "\n".join(_lines(script))
    except Exception:  # an error of the checker must not prevent training
        return
    if text:
        print(text, file=sys.stderr, flush=True)


def _lines(script: Script | str | os.PathLike[str]) -> list[str]:
    if _is_ours(script) or _size(script) > MOST_BYTES:
        return []
    all_findings = check(script)
    findings = [finding for kind in KINDS for finding in all_findings if finding.kind == kind]
    processes = _own_processes(script)
    if not findings:
        return processes
    more = f"{len(findings) - MOST_LINES} more; " if len(findings) > MOST_LINES else ""
    call = (
        "labkit.check(script)"
        if isinstance(script, Script)
        else f"labkit check {shlex.quote(plain(os.fspath(script)))}"
    )
    return [*processes, *(finding.short for finding in findings[:MOST_LINES]), f"{more}{call} explains why and the fix"]


def _own_processes(script: Script | str | os.PathLike[str]) -> list[str]:
    """Mistakes that matter only because torchrun runs the script on every rank."""
    source = read(script)
    text = source.pieces[0].text
    tree = tree_of(text)
    lines = [
        f"{source.name}:{call.lineno}: mp.spawn starts ranks, but torchrun has already started them: call the spawned "
        "function directly with int(os.environ['RANK'])"
        for call in tree.torch_calls("spawn", "start_processes")
    ]
    loaders = [call for call in tree.torch_calls("DataLoader") if _is_spawn(keyword(call, "multiprocessing_context"))]
    loaders += [call for call in tree.torch_calls("set_start_method") if call.args and _is_spawn(call.args[0])]
    if loaders and not has_main_guard(text):
        lines.append(
            f"{source.name}:{loaders[0].lineno}: every spawned worker process imports this script again and trains: "
            'put the main code under `if __name__ == "__main__":`'
        )
    return lines


def _is_spawn(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value == "spawn"


def _is_ours(script: Script | str | os.PathLike[str]) -> bool:
    if isinstance(script, Script):
        return is_library(script)
    return isinstance(script, str) and script in script_names()


def _size(script: Script | str | os.PathLike[str]) -> int:
    return len(str(script)) if isinstance(script, Script) else Path(script).stat().st_size
