"""torchrun as a fork of a supervisor that has imported it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from labkit.launcher.warm import PLACE
from labkit.record.folder import MARKER

__all__ = ["ForkedTorchrun", "can_show", "show_command"]

TORCHRUN = "torch.distributed.run"
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # by the supervisor


class ForkedTorchrun:
    """`python -m torch.distributed.run …` with an interface like that of subprocess.Popen. `in_child` is called in it
    before it starts."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: int, in_child: Callable[[], object]
    ) -> None:
        arguments = (command, environment, log, in_child)
        self._process = multiprocessing.get_context("fork").Process(target=_run, args=arguments)
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)  # until they no longer reach the supervisor's handlers
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        self.pid = self._process.pid or 0

    @staticmethod
    def can_run(command: Sequence[str]) -> bool:
        """Whether this process has imported torchrun, and has no other threads, which a fork would lose."""
        is_torchrun = TORCHRUN in sys.modules and list(command[1:3]) == ["-m", TORCHRUN]
        return is_torchrun and can_show() and len([*Path("/proc/self/task").iterdir()]) == 1

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        return cast(int, self._process.exitcode)


def _run(command: Sequence[str], environment: Mapping[str, str], log: int, in_child: Callable[[], object]) -> None:
    signal.set_wakeup_fd(-1)
    for number in HANDLED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    os.setsid()
    in_child()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(command[2:])
    show_command(command)
    _show_variable(MARKER, environment[MARKER])
    try:
        sys.modules[TORCHRUN].main()
    except Exception:  # shown as the interpreter does
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def can_show() -> bool:
    """Whether this process is the warm one or a fork of it, on a kernel that says where it reads what /proc shows."""
    try:
        (start, end), (first, last) = _memory("arg_start"), _memory("env_start")
        text = Path("/proc/self/environ").read_bytes()[: len(PLACE)]
    except (OSError, ValueError, IndexError):
        return False
    return 0 < start < end and 0 < first < last and text == PLACE


def show_command(command: Sequence[str]) -> None:
    """Let `ps` and /proc/<pid>/cmdline show this command for this process, cut to the length of its own command."""
    start, end = _memory("arg_start")
    text = b"\0".join(os.fsencode(word) for word in command)
    ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _show_variable(name: str, value: str) -> None:
    """Let /proc/<pid>/environ show this variable in the place that was kept for one: ranks and `sweep` look there."""
    start, _ = _memory("env_start")
    ctypes.memmove(start, os.fsencode(f"{name}={value}")[: len(PLACE) - 1].ljust(len(PLACE), b"\0"), len(PLACE))


def _memory(name: str) -> tuple[int, int]:
    """Where the kernel reads the command line or the environment of this process, from proc(5), `stat`: arg_start is
    its 48th field, env_start its 50th; each is followed by its end."""
    stat = Path("/proc/self/stat").read_text()
    fields = stat[stat.rindex(")") + 2 :].split()  # from the third on
    index = {"arg_start": 45, "env_start": 47}[name]
    return int(fields[index]), int(fields[index + 1])
