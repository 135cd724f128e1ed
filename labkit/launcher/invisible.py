"""Files that Python starts and whose frames are invisible, compiled into a run's folder for this Python.

CPython leaves a frame out of tracebacks, of `f_back` and of `inspect.stack()` as long as it has not executed RESUME, an
instruction at the start of each function that does nothing else that matters here (`_PyFrame_IsIncomplete`, Python 3.11
to 3.13). In these files each RESUME is a NOP. If another version of Python should show such frames, nothing else would
change.
"""

from __future__ import annotations

import importlib.util
import marshal
import opcode
from pathlib import Path
from types import CodeType

from labkit.record import RunFolder

__all__ = ["guest_code", "write_starting_files"]

LABKIT = Path(__file__).parents[1]
GUEST, OUTERMOST = LABKIT / "worker" / "guest.py", LABKIT / "launcher" / "warm" / "outermost.py"
RESUME, NOP = opcode.opmap["RESUME"], opcode.opmap["NOP"]
HEADER = importlib.util.MAGIC_NUMBER + bytes(12)  # no flags, time or size: it is never compared with the source


def write_starting_files(folder: RunFolder) -> None:
    """What torchrun starts on each rank, and what starts the supervisor."""
    folder.guest.write_bytes(HEADER + marshal.dumps(guest_code()))
    folder.outermost.write_bytes(HEADER + marshal.dumps(_invisible(OUTERMOST)))


def guest_code() -> CodeType:
    return _invisible(GUEST)


def _invisible(path: Path) -> CodeType:
    return _without_resume(compile(path.read_bytes(), str(path), "exec", dont_inherit=True))


def _without_resume(code: CodeType) -> CodeType:
    instructions = bytearray(code.co_code)
    for place in range(0, len(instructions), 2):
        if instructions[place] == RESUME:
            instructions[place : place + 2] = NOP, 0
    constants = (_without_resume(each) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_code=bytes(instructions), co_consts=tuple(constants))
