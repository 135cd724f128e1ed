"""Run what needs torch in child processes: the notebook's kernel never imports torch, and the patches for tensors
without data end with the child.

The first question starts a process that imports torch, which takes seconds, and forks a child for each question
(warm.py). It holds some 300 MiB and ends with this process.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from labkit.errors import LabError, LaunchError
from labkit.record.text import plain

__all__ = ["FORKS", "Unplannable", "ask", "asking", "close"]

FORKS = sys.platform == "linux"  # elsewhere system libraries may not survive a fork
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # a plan needs no device and must not occupy one
    "OMP_NUM_THREADS": "1",  # also because a fork loses threads
    "PYTHONSAFEPATH": "1",
}
LAST_BYTES = 500  # of what a process printed before it died


class Unplannable(LabError):
    """The script seems valid but cannot run on tensors without data."""


class _Server(NamedTuple):
    process: subprocess.Popen[bytes]
    control: socket.socket  # takes the sockets of questions
    printed: IO[bytes]
    path: str | None  # PYTHONPATH

    def close(self) -> None:
        self.control.close()
        self.process.wait()
        self.printed.close()


_lock = threading.Lock()
_servers: list[_Server] = []  # at most one
_questions: dict[socket.socket, str] = {}  # being answered, with the name of the thread that waits for each


@contextmanager
def asking() -> Iterator[ThreadPoolExecutor]:
    """A thread pool for `ask`. On an error or an interrupt, the children of its threads are killed."""
    name = f"labkit asks {os.urandom(4).hex()}"
    with ThreadPoolExecutor(thread_name_prefix=name) as threads:
        try:
            yield threads
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for question, waiting in list(_questions.items()):
                if waiting.startswith(name):
                    with suppress(OSError):
                        question.shutdown(socket.SHUT_RDWR)
            raise


def ask(function: str, question: Mapping[str, Any]) -> Any:
    """The answer of `labkit.planner.model.<function>`, such as "counting.count", to the question's items.

    Raises LaunchError with the script's own message if it refuses its options, Unplannable if it cannot be planned.
    """
    request = {"function": function, "question": question, "folder": str(Path.cwd())}
    request["environment"] = os.environ | ENVIRONMENT
    with tempfile.TemporaryFile() as printed, _server() as server:
        reply = _reply_of(server, json.dumps(request).encode(), printed)
        answer, _, status = reply.partition(b"\n")
        try:
            answered = json.loads(answer)
        except ValueError:
            how = f"exit code {int(status)}" if status else ""
            died = "; ".join(filter(None, (how, _end_of(printed) or _end_of(server.printed))))
            raise Unplannable(f"the process that plans the script died: {died}") from None
    if "refused" in answered:
        raise LaunchError(plain(answered["refused"]))
    if "problem" in answered:
        raise Unplannable(plain(answered["problem"]))
    return answered["answer"]


def _reply_of(server: _Server, request: bytes, printed: IO[bytes]) -> bytes:
    """All that the child writes, which ends when we close the socket."""
    ours, theirs = socket.socketpair()
    with ours:
        _questions[ours] = threading.current_thread().name
        try:
            with theirs:
                socket.send_fds(server.control, [b"?"], [theirs.fileno(), printed.fileno()])
            ours.sendall(request + b"\n")
            return b"".join(iter(lambda: ours.recv(1 << 16), b""))
        except (BrokenPipeError, ConnectionResetError):  # the process died
            return b""
        finally:
            del _questions[ours]


@contextmanager
def _server() -> Iterator[_Server]:
    """The process that has imported torch: a running one if it may fork."""
    path = os.environ.get("PYTHONPATH")
    if not FORKS:
        server = _started(path)
        try:
            yield server
        finally:
            server.close()
        return
    with _lock:
        if _servers and (_servers[0].process.poll() is not None or _servers[0].path != path):
            _servers.pop().close()
        if not _servers:
            _servers.append(_started(path))
        server = _servers[0]
    yield server


def _started(path: str | None) -> _Server:
    ours, theirs = socket.socketpair()
    printed = tempfile.TemporaryFile()  # noqa: SIM115
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "labkit.planner.model.warm", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,  # an interrupt ends the question, not the process
        )
    return _Server(process, ours, printed, path)


def _end_of(printed: IO[bytes]) -> str:
    printed.seek(max(0, printed.seek(0, os.SEEK_END) - LAST_BYTES))
    return plain(printed.read().decode(errors="replace").strip())


@atexit.register
def close() -> None:
    """End the process that has imported torch, if there is one."""
    while _servers:
        _servers.pop().close()
