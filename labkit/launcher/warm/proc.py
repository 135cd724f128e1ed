"""Sets what /proc, and so `ps`, shows for a fork: its own command and variables, in room that its first ancestor
left."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["ROOM", "can_show", "show_command", "show_variables", "with_room"]

ROOM, DASHES = "LABKIT_PLACE", "-" * 300  # a process's first variable, in whose place its forks show their own
PLACE = f"{ROOM}={DASHES}".encode()
LONGEST_COMMAND = 5000  # bytes


def with_room(command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """A command and an environment with room for those that forks of the process show."""
    return [*command, " " * LONGEST_COMMAND], {ROOM: DASHES, **environment}


def can_show() -> bool:
    """Whether this process has such room, and the kernel says where it reads what /proc shows."""
    try:
        (start, end), (first, last) = _memory("arg_start"), _memory("env_start")
        text = Path("/proc/self/environ").read_bytes()[: len(PLACE)]
    except (OSError, ValueError, IndexError):
        return False
    return 0 < start < end and 0 < first < last and text == PLACE


def show_command(command: Sequence[str]) -> None:
    """Let `ps` and /proc/<pid>/cmdline show this command for this process, cut to the room."""
    start, end = _memory("arg_start")
    text = b"\0".join(os.fsencode(word) for word in command)
    ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)


def show_variables(variables: Mapping[str, str]) -> None:
    """Let /proc/<pid>/environ show these variables in the room that was kept for them, as many as fit. `sweep` looks
    for the run's marker there."""
    start, _ = _memory("env_start")
    text = b""
    for name, value in variables.items():
        if len(more := text + os.fsencode(f"{name}={value}\0")) < len(PLACE):
            text = more
    ctypes.memmove(start, text.ljust(len(PLACE), b"\0"), len(PLACE))


def _memory(name: str) -> tuple[int, int]:
    """Where the kernel reads the command line or the environment of this process, from proc(5), `stat`: arg_start is
    its 48th field, env_start its 50th; each is followed by its end."""
    stat = Path("/proc/self/stat").read_text()
    fields = stat[stat.rindex(")") + 2 :].split()  # from the third on
    index = {"arg_start": 45, "env_start": 47}[name]
    return int(fields[index]), int(fields[index + 1])
