"""Functions whose frames are invisible: those of labkit that stand between a script and what it calls, or below it.

CPython leaves a frame out of tracebacks, of `f_back` and of `inspect.stack()` as long as it has not executed RESUME, an
instruction at the start of each function that does nothing else that matters here (`_PyFrame_IsIncomplete`, Python 3.11
to 3.13). In the code of these functions it is a NOP. If another version of Python should show their frames, nothing
else would change.
"""

from __future__ import annotations

import opcode
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import ParamSpec, TypeVar, cast

__all__ = ["invisible", "without_resume"]

P = ParamSpec("P")
R = TypeVar("R")
RESUME, NOP = opcode.opmap["RESUME"], opcode.opmap["NOP"]


def invisible(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, without frames that can be seen. A decorator for what is defined in a function or a module."""
    plain = cast(FunctionType, function)
    plain.__code__ = without_resume(plain.__code__)
    return function


def without_resume(code: CodeType) -> CodeType:
    """The code, also of the functions in it."""
    instructions = bytearray(code.co_code)
    for place in range(0, len(instructions), 2):
        if instructions[place] == RESUME:
            instructions[place : place + 2] = NOP, 0
    constants = (without_resume(each) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_code=bytes(instructions), co_consts=tuple(constants))
