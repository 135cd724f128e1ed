"""Finds the code of a line of the script, or of a module that it has imported, and calls a function whenever the
training's thread comes to this line.

From Python 3.12 on, only the code with this line is instrumented (`sys.monitoring`); in 3.11 the thread is traced,
which takes about 1 µs for each call of a Python function. Without a breakpoint there is neither.
"""

from __future__ import annotations

import dis
import gc
import os
import sys
from _thread import get_ident
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from labkit.text import listed
from labkit.worker.reach.evaluate import is_users

# Instructions that a function executes before its first line.
PROLOGUE = {"RESUME", "COPY_FREE_VARS", "MAKE_CELL", "RETURN_GENERATOR", "POP_TOP"}
MOST_FILES = 5


def name_of_line(code: CodeType, line: int) -> str:
    """`train.py:26 in train_step`"""
    function = "" if code.co_name == "<module>" else f" in {code.co_name}"
    return f"{Path(code.co_filename).name}:{line}{function}"


def code_with(file: str, line: int) -> list[CodeType]:
    """The code that has this line of a file, which is named by the end of its path. Raises LookupError."""
    loaded: dict[str, list[CodeType]] = {}
    for code in _loaded():
        loaded.setdefault(code.co_filename, []).append(code)
    found = [path for path in loaded if f"/{path}".endswith(f"/{file.removeprefix('./')}")]
    found = [path for path in found if is_users(path)] or found
    if not found:
        own = sorted({Path(path).name for path in loaded if is_users(path) and Path(path).is_file()})
        raise LookupError(
            f"{file} is neither the script nor a module that it has imported; of your own files it runs "
            f"{listed(own, MOST_FILES)}"
        )
    if len({*map(os.path.realpath, found)}) > 1:
        raise LookupError(f"{file} may be {listed(sorted(found), MOST_FILES)}; name its folder, too")
    lines: dict[int, list[CodeType]] = {}
    for code in (code for path in found for code in loaded[path]):
        for each in _lines_of(code):
            lines.setdefault(each, []).append(code)
    if line not in lines:
        nearest = sorted(lines, key=lambda each: abs(each - line))[:2]
        raise LookupError(
            f"line {line} of {file} has no code that can still run; the nearest lines that have are "
            f"{' and '.join(map(str, sorted(nearest)))}"
        )
    whole = [code for code in lines[line] if not code.co_name.startswith("<") or code.co_name == "<module>"]
    return whole or lines[line]  # not each element of a comprehension in this line


def _loaded() -> Iterator[CodeType]:
    """The code of all functions, and that which this thread is executing, with what is nested in it."""
    codes = [each.__code__ for each in gc.get_objects() if type(each) is FunctionType]
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    seen: set[int] = set()
    while codes:
        code = codes.pop()
        if id(code) not in seen and code.co_filename[:1] != "<":
            seen.add(id(code))
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            yield code


def _lines_of(code: CodeType) -> set[int]:
    instructions = [*dis.get_instructions(code)]
    start = next((i for i, each in enumerate(instructions) if each.opname not in PROLOGUE), 0)
    lines = {each.positions.lineno for each in instructions[start:] if each.positions and each.positions.lineno}
    for nested in code.co_consts:
        if isinstance(nested, CodeType) and nested.co_name[:1] != "<":  # a breakpoint at its `def` means its body
            body = min(_lines_of(nested), default=0)
            lines = {line for line in lines if not nested.co_firstlineno <= line < body}
    return lines


class LineTrap:
    """Calls `reached` in the thread that has made it, before it executes this line, until `remove`. Raises LookupError
    if another debugger is in the way."""

    def __init__(self, codes: list[CodeType], line: int, reached: Callable[[], None]):
        self._codes, self._line, self._reached = codes, line, reached
        self._ids = {id(code) for code in codes}
        self._thread, self._process = get_ident(), os.getpid()
        if sys.version_info >= (3, 12):
            self._monitor(sys.monitoring)
        else:
            self._trace()

    def _monitor(self, monitoring: Any) -> None:
        free = [tool for tool in (4, 3, monitoring.DEBUGGER_ID) if monitoring.get_tool(tool) is None]
        if not free:
            raise LookupError("other debuggers use all of sys.monitoring's tools")
        self._tool, line = free[0], monitoring.events.LINE
        monitoring.use_tool_id(self._tool, "labkit")
        monitoring.register_callback(self._tool, line, self._on_line)
        for code in self._codes:
            monitoring.set_local_events(self._tool, code, line)

    def _on_line(self, code: CodeType, line: int) -> Any:
        if line != self._line:
            return sys.monitoring.DISABLE  # type: ignore[attr-defined]
        if get_ident() == self._thread and os.getpid() == self._process:
            self._reached()
        return None

    def _trace(self) -> None:
        if sys.gettrace() is not None:
            raise LookupError("the script is traced by another debugger or a measurement of coverage, sys.settrace()")
        sys.settrace(self._on_call)
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if id(frame.f_code) in self._ids:
                frame.f_trace = self._on_event
            frame = frame.f_back

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._on_event if id(frame.f_code) in self._ids else None

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_lineno == self._line and os.getpid() == self._process:
            self._reached()
        return self._on_event if self._line >= 0 else None  # None keeps what another trap has put in its place

    def remove(self) -> None:
        self._line = -1
        if sys.version_info >= (3, 12):
            monitoring: Any = sys.monitoring
            for code in self._codes:
                monitoring.set_local_events(self._tool, code, 0)
            monitoring.register_callback(self._tool, monitoring.events.LINE, None)
            monitoring.free_tool_id(self._tool)
            return
        if get_ident() == self._thread:
            sys.settrace(None)
