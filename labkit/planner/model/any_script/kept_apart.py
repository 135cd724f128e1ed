"""Keeps what a planned script writes in a temporary folder, where the script finds it again.

Runs in a child process, whose files it redirects until the process ends. What changes files in another way, such as
another program or a library in C++, is refused.
"""

from __future__ import annotations

import builtins
import ctypes
import io
import os
import re
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR
DEVICES = ("/dev/", "/proc/")
MOST_COPIED = 1 << 26
# Audit events of what would change a file or start a program, with the indices of the paths.
CHANGES = {
    "os.link": (1,),
    "os.symlink": (1,),
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.truncate": (0,),
    "open": (0,),
}
PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
# Landlock, of Linux (linux/landlock.h): system calls, and the rights to write, remove and make files and folders.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF, NO_NEW_PRIVILEGES = 444, 445, 446, 38
LANDLOCK_VERSION, PATH_BENEATH = 1, 1
REMOVING_FOLDERS = 1 << 4
CHANGING = 1 << 1 | sum(1 << bit for bit in range(4, 13))
MOVING = 1 << 13  # between folders; since version 2
TRUNCATING = 1 << 14  # since version 3
# What libraries say of it: C's EACCES, SQLite
REFUSED = re.compile(r"[Pp]ermission denied|unable to open database|readonly database")
READING = ("stat", "lstat", "listdir", "scandir", "access", "chdir", "chmod", "utime", "remove", "unlink", "rmdir")


class KeptApart:
    """Redirects what this process writes to `folder`. `written` are the paths that the script meant."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.realpath(folder)
        _forbid_changes_outside(self._folder)
        self.written: set[str] = set()
        self._make, self._exists = os.mkdir, os.path.exists
        tempfile.tempdir = os.environ["TMPDIR"] = self._folder
        for name in READING:
            setattr(os, name, self._following(getattr(os, name)))
        for name in ("rename", "replace"):
            setattr(os, name, self._moving(getattr(os, name)))
        os.mkdir = self._mkdir
        os.open = self._opening(os.open, _flags_write)
        builtins.open = io.open = self._opening(io.open, _mode_writes)
        sys.addaudithook(self._refuse)

    def _following(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **named: Any) -> Any:
            is_relative = named.get("dir_fd") is not None  # to a folder that was opened where it is kept
            return function(path if is_relative else self._found(path), *args, **named)

        return call

    def _moving(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, target: Any, *args: Any, **named: Any) -> Any:
            return function(self._found(source), self._to_write(target), *args, **named)

        return call

    def _opening(self, function: Callable[..., Any], writes: Callable[..., tuple[bool, bool]]) -> Callable[..., Any]:
        def call(file: Any, *args: Any, **named: Any) -> Any:
            anything, keeps = writes(*args, **named)
            if anything and keeps:
                self._copy(file)
            return function(self._to_write(file) if anything else self._found(file), *args, **named)

        return call

    def _mkdir(self, path: Any, *args: Any, **named: Any) -> None:
        if self._exists(path):
            raise FileExistsError(17, "File exists", path)
        self._make(self._to_write(path), *args, **named)

    def _place(self, path: Any) -> str | None:
        """Where a path outside the folder is kept inside; None for what is not redirected."""
        try:
            name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
        except TypeError:  # a file descriptor
            return None
        return None if name.startswith((self._folder, *DEVICES)) else self._folder + name

    def _found(self, path: Any) -> Any:
        place = self._place(path)
        return place if place and self._exists(place) else path

    def _to_write(self, path: Any) -> Any:
        place = self._place(path)
        if place is None:
            return path
        self.written.add(place.removeprefix(self._folder))
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        return place

    def _copy(self, path: Any) -> None:
        """Copy a file to which the script adds."""
        place = self._place(path)
        if place and not self._exists(place) and Path(path).is_file():
            if Path(path).stat().st_size > MOST_COPIED:
                raise PermissionError(f"a plan changes no file, and does not copy one of this size: {path!r}")
            Path(self._to_write(path)).write_bytes(Path(path).read_bytes())

    def _refuse(self, event: str, args: tuple[Any, ...]) -> None:
        if event in PROGRAMS:
            raise PermissionError(f"a plan starts no other program: {args[0]!r}")
        if event not in CHANGES or (event == "open" and not (isinstance(args[2], int) and args[2] & WRITES)):
            return
        for index in CHANGES[event]:
            path = args[index]
            folder = next((fd for fd in args[index + 1 :] if isinstance(fd, int) and fd >= 0), -1)
            if event not in ("open", "os.truncate") and folder >= 0:  # which the path is relative to
                path = Path(os.path.realpath(f"/proc/self/fd/{folder}"), os.fsdecode(path))
            if self._place(path) is not None:
                raise PermissionError(f"a plan changes no file: {event} of {args[index]!r}")


def _forbid_changes_outside(folder: str) -> None:
    """Let the kernel refuse what is not written by Python's functions, if it can: SQLite, Arrow and safetensors open
    files themselves."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    version = library.syscall(CREATE_RULESET, None, 0, LANDLOCK_VERSION)
    if version < 1:
        return
    rights = CHANGING | (MOVING if version >= 2 else 0) | (TRUNCATING if version >= 3 else 0)
    ruleset = library.syscall(CREATE_RULESET, struct.pack("Q", rights), 8, 0)
    if ruleset < 0:
        return
    # the folder itself is removed in the end, when it is empty
    for path, allowed in ((folder, rights), *((each, rights) for each in DEVICES), (f"{folder}/..", REMOVING_FOLDERS)):
        beneath = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        library.syscall(ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", allowed, beneath), 0)
        os.close(beneath)
    library.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    library.syscall(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _flags_write(flags: int, *_: Any, **__: Any) -> tuple[bool, bool]:
    """Whether flags of os.open allow to write, and whether they keep what is there."""
    return bool(flags & WRITES), not flags & os.O_TRUNC


def _mode_writes(mode: Any = "r", *_: Any, **__: Any) -> tuple[bool, bool]:
    """Whether a mode of open allows to write, and whether it keeps what is there."""
    return isinstance(mode, str) and bool({*mode} & {*"wax+"}), "w" not in str(mode)
