"""Lets a fork become another process: it leaves its stack, is told over a socket what to be, and shows that in /proc.

What `ps` shows is the fork's own command and variables, in room that its first ancestor left. The files that Python
starts, whose frames are invisible (worker/frames.py), are compiled into a run's folder.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import marshal
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from labkit.record import RunFolder
from labkit.worker import with_late_resume

LABKIT = Path(__file__).parents[2]
GUEST, OUTERMOST = LABKIT / "worker" / "guest.py", LABKIT / "launcher" / "warm" / "outermost.py"
HEADER = importlib.util.MAGIC_NUMBER + bytes(12)  # no flags, time or size: it is never compared with the source
MOST_DESCRIPTORS = 8
ROOM, DASHES = "LABKIT_PLACE", "-" * 300  # a process's first variable, in whose place its forks show their own
PLACE = f"{ROOM}={DASHES}".encode()
LONGEST_COMMAND = 5000  # bytes


class Become(BaseException):
    """Raised in a fork; outermost.py then calls the steps, one after another. Not an Exception, which may be caught.

    On the way up the fork's copies of files and sockets are closed; nothing may be done that concerns both processes.
    """

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps = steps


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


def send(control: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    text = json.dumps(message).encode()
    socket.send_fds(control, [len(text).to_bytes(8, "big")], descriptors)
    control.sendall(text)


def receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and its descriptors; no message when the other end was closed."""
    try:
        size, descriptors, *_ = socket.recv_fds(control, 8, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # it was closed before what this end had sent was read
        size, descriptors = b"", []
    if not size:
        return None, descriptors
    return json.loads(control.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)), descriptors


def write_starting_files(folder: RunFolder) -> None:
    """Write what torchrun starts on each rank, and what starts the supervisor."""
    folder.guest.write_bytes(HEADER + marshal.dumps(guest_code()))
    folder.outermost.write_bytes(HEADER + marshal.dumps(_compiled(OUTERMOST)))


def guest_code() -> CodeType:
    return _compiled(GUEST)


def _compiled(path: Path) -> CodeType:
    return with_late_resume(compile(path.read_bytes(), str(path), "exec", dont_inherit=True))
