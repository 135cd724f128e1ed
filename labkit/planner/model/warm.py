"""The process that answers the questions of child.py: it imports torch once and forks a child for each question.

    python -m labkit.planner.model.warm FD

FD is a socket over which the asking process sends, for each question, a socket and a file for what the script prints.
The process ends when that process does. A child is killed when its asker closes the question's socket.
"""

from __future__ import annotations

import importlib
import json
import linecache
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any

import labkit.planner.model.counting
import labkit.planner.model.rehearsal
import labkit.planner.model.sizes
import labkit.worker.measures.tracker  # noqa: F401
from labkit.planner.model.child import FORKS
from labkit.planner.model.fake_run import DEPENDS_ON_DATA, SCRIPT_FILE


def serve(control: socket.socket) -> None:
    """Answer questions until the asking process ends."""
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not control:  # a child has ended
                    selector.unregister(key.fileobj)
                    _forget(key.fd, *key.data)
                    continue
                _, files, *_ = socket.recv_fds(control, 1, 2)
                if not files:
                    return
                asker, printed = socket.socket(fileno=files[0]), files[1]
                child = os.fork() if FORKS else 0
                if not child:
                    for other in list(selector.get_map().values()):  # else they would stay open as long as this child
                        os.close(other.fd)
                        if other.data:
                            other.data[1].close()
                    answer(asker, printed)
                os.close(printed)
                selector.register(os.pidfd_open(child), selectors.EVENT_READ, (child, asker))


def _forget(descriptor: int, child: int, asker: socket.socket) -> None:
    """Tell the asker the exit code, by which it knows that nothing more will come."""
    os.close(descriptor)
    _, status = os.waitpid(child, 0)
    with asker, suppress(OSError):  # the asker gave up
        asker.sendall(f"\n{os.waitstatus_to_exitcode(status)}".encode())


def answer(asker: socket.socket, printed: int) -> None:
    """Answer one question; does not return."""
    os.dup2(printed, 1), os.dup2(printed, 2)
    request = json.loads(asker.makefile("rb").readline())
    threading.Thread(target=_end_with, args=[asker], daemon=True).start()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    module, _, name = request["function"].partition(".")
    function = getattr(importlib.import_module(f"labkit.planner.model.{module}"), name)
    try:
        result: dict[str, Any] = {"answer": function(**request["question"])}
    except SystemExit as error:
        result = {"refused": str(error)}
    except Exception as error:
        result = {"problem": _where(error) + _why(error)}
    asker.sendall(json.dumps(result).encode())
    sys.stderr.flush()
    os._exit(0)  # fake process groups need no clean-up


def _end_with(asker: socket.socket) -> None:
    while asker.recv(1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def _why(error: Exception) -> str:
    if type(error).__name__ in DEPENDS_ON_DATA:
        return "the result depends on a tensor's values, but tensors in a plan have none"
    return f"{type(error).__name__}: {str(error).strip()}"


def _where(error: BaseException) -> str:
    """The last line of the script in the traceback, numbered within its cell."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == SCRIPT_FILE]
    if not lines:
        return ""
    number = lines[-1].lineno or 0
    text = enumerate(linecache.getlines(SCRIPT_FILE)[:number], 1)
    above = [(n, line) for n, line in text if line.startswith("# %% ")]
    where = f"the {above[-1][1][5:].strip()!r} cell, line {number - above[-1][0]}" if above else f"line {number}"
    return f"{where} ({(lines[-1].line or '').strip()}): "


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # nothing to clean up
