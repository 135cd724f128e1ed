"""Makes the frames of functions invisible: those of labkit that stand between a script and what it calls, or below it.

CPython leaves a frame out of tracebacks, of `f_back` and of `inspect.stack()` as long as it has not executed RESUME, an
instruction at the start of each function that does nothing else that matters here (`_PyFrame_IsIncomplete`, Python 3.11
to 3.13). The code of these functions executes it before each of its ends instead: there profilers hear of a call, and
then of its end, which they would otherwise take for that of its caller. If another version of Python should show their
frames, nothing else would change.
"""

from __future__ import annotations

import dis
import inspect
import opcode
import sys
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
RESUME, NOP, JUMP, RERAISE, EXTENDED_ARG = (
    opcode.opmap[name] for name in ("RESUME", "NOP", "JUMP_FORWARD", "RERAISE", "EXTENDED_ARG")
)
RETURNS = {opcode.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in opcode.opmap}
QUIET = 2  # RESUME's argument with which it does not look for signals
FARTHEST_JUMP = 255  # instructions, without a further argument
GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR  # their frames are never hidden


def invisible(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, without frames that can be seen. A decorator for what is defined in a function or a module."""
    plain = cast(FunctionType, function)
    plain.__code__ = with_late_resume(plain.__code__)
    leave_out_of_compilation(function)
    return function


def leave_out_of_compilation(function: Callable[..., Any], *, with_callees: bool = False) -> None:
    """Have torch.compile run this function as it is. `torch.compiler.disable` would import the compiler."""
    code = getattr(function, "__code__", None)
    if code is None or (compiler := sys.modules.get("torch._C._dynamo.eval_frame")) is None:
        return
    with suppress(AttributeError):  # private
        skip, default = compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT
        strategy = compiler._FrameExecStrategy(skip, skip if with_callees else default)
        compiler.set_code_exec_strategy(code, strategy)


def with_late_resume(code: CodeType) -> CodeType:
    """The code, and that of the functions in it, which executes RESUME before each of its ends instead."""
    constants = (with_late_resume(each) if isinstance(each, CodeType) else each for each in code.co_consts)
    code = code.replace(co_consts=tuple(constants))
    if code.co_flags & GENERATORS:
        return code
    words, size = bytearray(code.co_code), len(code.co_code)
    words += bytes([RESUME, QUIET, RERAISE, 0])  # for an exception that leaves the function
    for place in range(0, size, 2):
        jump, is_long = (len(words) - place - 2) // 2, place > 0 and words[place - 2] == EXTENDED_ARG
        if words[place] == RESUME:
            words[place : place + 2] = NOP, 0
        elif words[place] in RETURNS and jump <= FARTHEST_JUMP and not is_long:
            words += bytes([RESUME, QUIET, *words[place : place + 2]])
            words[place : place + 2] = JUMP, jump
    table, end = bytearray(), 0
    handled = [(e.start, e.end, e.target, e.depth, e.lasti) for e in dis._parse_exception_table(code)]  # type: ignore[attr-defined]
    for start, stop, target, depth, keeps_place in [*sorted(handled), (size, size, 0, 0, False)]:
        if start > end:
            table += _handler(end, start, size, 0)
        if stop > start:
            table += _handler(start, stop, target, depth << 1 | keeps_place)
        end = max(end, stop)
    return code.replace(co_code=bytes(words), co_exceptiontable=bytes(table), co_stacksize=code.co_stacksize + 1)


def _handler(start: int, stop: int, target: int, depth: int) -> bytes:
    """An entry of an exception table, see CPython's InternalDocs/exception_handling.md. Places are in bytes of code."""
    entry = bytearray()
    for number in (start // 2, (stop - start) // 2, target // 2, depth):
        digits = [number >> shift & 63 for shift in range(30, -6, -6) if number >> shift or not shift]
        entry += bytes([*(digit | 64 for digit in digits[:-1]), digits[-1]])
    entry[0] |= 128
    return bytes(entry)
