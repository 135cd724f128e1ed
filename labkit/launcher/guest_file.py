"""`guest.pyc` in a run folder: what torchrun starts on each rank (worker/guest.py), compiled for this Python.

Its frames are invisible. CPython leaves a frame out of tracebacks, of `f_back` and of `inspect.stack()` as long as it
has not executed RESUME, the instruction at the start of each function, which does nothing else that matters here
(`_PyFrame_IsIncomplete`, 3.11 to 3.13). So in the guest's code each RESUME is a NOP. Where another version of Python
should not do this, the frames would be seen, and nothing else would change.
"""

from __future__ import annotations

import importlib.util
import marshal
import opcode
from pathlib import Path
from types import CodeType

from labkit.record import RunFolder

__all__ = ["guest_code", "write_guest"]

GUEST = Path(__file__).parents[1] / "worker" / "guest.py"
RESUME, NOP = opcode.opmap["RESUME"], opcode.opmap["NOP"]
HEADER = importlib.util.MAGIC_NUMBER + bytes(12)  # no flags, no time, no size: never compared with the source


def write_guest(folder: RunFolder) -> None:
    folder.guest.write_bytes(HEADER + marshal.dumps(guest_code()))


def guest_code() -> CodeType:
    return _without_resume(compile(GUEST.read_bytes(), str(GUEST), "exec", dont_inherit=True))


def _without_resume(code: CodeType) -> CodeType:
    instructions = bytearray(code.co_code)
    for place in range(0, len(instructions), 2):
        if instructions[place] == RESUME:
            instructions[place : place + 2] = NOP, 0
    constants = (_without_resume(each) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_code=bytes(instructions), co_consts=tuple(constants))
