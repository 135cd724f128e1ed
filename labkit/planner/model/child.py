"""Runs what needs torch in child processes: the notebook's kernel never imports torch, and the patches for tensors
without data end with the child.

The first question starts a server that imports torch, which takes seconds, and forks a child for each question
(question_server.py). It holds some 300 MiB and ends with this process.
"""

from __future__ import annotations

import atexit
import json
import os
import re
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
from labkit.planner.model.answers import Answers
from labkit.text import plain

FORKS = sys.platform == "linux"  # elsewhere system libraries may not survive a fork
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # a plan needs no device and must not occupy one
    "OMP_NUM_THREADS": "1",  # also because a fork loses threads
    "PYTHONSAFEPATH": "1",
}
READ_AT_START = (
    "HF_",
    "HOME",
    "LD_",
    "PYTHON",
    "PYTORCH",
    "TMPDIR",
    "TORCH",
    "TRANSFORMERS_",
    "USE_",
    "XDG_",
)  # variables that only a new server would notice
LAST_BYTES, MOST_BYTES = 500, 1 << 16  # of what a process printed before it died
THROWN = re.compile(r"terminate called.*\n +what\(\): +(.+)")


class Unplannable(LabError):
    """The script seems valid but cannot run on tensors without data. `signature` is that of the error with which it
    ended (real_step.py); "" if only tensors without data have it."""

    def __init__(self, message: str, signature: str = "") -> None:
        super().__init__(message)
        self.signature = signature


class WillFail(Unplannable):
    """The script fails, on tensors with data as well."""


class _Server(NamedTuple):
    process: subprocess.Popen[bytes]
    control: socket.socket  # takes the sockets of questions
    printed: IO[bytes]
    variables: dict[str, str]

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()
        self.printed.close()


_lock = threading.Lock()
_servers: list[_Server] = []  # at most one
_questions: dict[socket.socket, str] = {}  # being answered, with the name of the thread that waits for each
_stopped: set[str] = set()  # thread pools that are being shut down
_answers = Answers()


@contextmanager
def asking() -> Iterator[ThreadPoolExecutor]:
    """A thread pool for `ask`. On an error or an interrupt, the children of its threads are killed."""
    name = f"labkit asks {os.urandom(4).hex()}"
    with ThreadPoolExecutor(thread_name_prefix=name) as threads:
        try:
            yield threads
        except BaseException:
            _stopped.add(name)
            threads.shutdown(wait=False, cancel_futures=True)
            for question, thread in list(_questions.items()):
                if thread.startswith(name):
                    with suppress(OSError):
                        question.shutdown(socket.SHUT_RDWR)
            raise
    _stopped.discard(name)


def ask(function: str, question: Mapping[str, Any]) -> Any:
    """The answer of `labkit.planner.model.<function>`, such as "counting.count", to the question's items: an earlier
    one if the options and files that it depends on are the same.

    Raises LaunchError with the script's own message if it refuses its options, Unplannable if it cannot be planned.
    """
    try:
        folder = str(Path.cwd())
    except OSError:
        raise Unplannable("the working directory was deleted: change to another one") from None
    request = {"function": function, "question": question, "folder": folder, "environment": os.environ | ENVIRONMENT}
    key, argv = json.dumps(request | {"question": {**question, "argv": None}}), question["argv"]
    if known := _answers.find(key, argv):
        return known.value
    with tempfile.TemporaryFile() as printed:
        reply, died = _reply(json.dumps(request).encode(), printed)
    try:
        answered = json.loads(reply)
    except ValueError:
        raise Unplannable(f"the process that plans the script died: {died}") from None
    if "refused" in answered:
        raise LaunchError(plain(answered["refused"]))
    if "problem" in answered:
        raise Unplannable(plain(answered["problem"]), answered["signature"])
    _answers.add(key, argv, answered["reads"], answered["answer"])
    return answered["answer"]


def _reply(request: bytes, printed: IO[bytes]) -> tuple[bytes, str]:
    """The child's reply, and if there is none, how the child died. Closing our end of the socket kills the child."""
    thread = threading.current_thread().name
    ours, theirs = socket.socketpair()
    output, process, log = b"", None, printed
    with ours:
        _questions[ours] = thread
        try:
            if any(map(thread.startswith, _stopped)):
                raise Unplannable("interrupted")
            with theirs:
                process, log = _hand_over(theirs, printed)
            ours.sendall(request + b"\n")
            output = b"".join(iter(lambda: ours.recv(1 << 16), b""))
        except OSError:  # the process has died
            pass
        finally:
            del _questions[ours]
            if process and not FORKS:
                process.kill()
    reply, _, status = output.partition(b"\n")
    code = status.decode() or _exit_code(process)
    return reply, "; ".join(filter(None, (f"exit code {code}", _end_of(printed) or ("" if status else _end_of(log)))))


def _hand_over(question: socket.socket, printed: IO[bytes]) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Let a child answer. Returns the process without which there will be no answer, and the file of what it prints."""
    if not FORKS:
        return _started(question, printed, "once"), printed
    variables = {name: value for name, value in os.environ.items() if name.startswith(READ_AT_START)}
    with _lock:
        if _servers and (_servers[0].process.poll() is not None or _servers[0].variables != variables):
            _servers.pop().close()
        if not _servers:
            ours, theirs = socket.socketpair()
            log = tempfile.TemporaryFile()  # noqa: SIM115
            with theirs:
                _servers.append(_Server(_started(theirs, log), ours, log, variables))
        server = _servers[0]
        socket.send_fds(server.control, [b"?"], [question.fileno(), printed.fileno()])
    return server.process, server.printed


def _started(stdin: socket.socket, printed: IO[bytes], *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "labkit.planner.model.question_server", *arguments],
        stdin=stdin.fileno(),
        stdout=printed,
        stderr=printed,
        env=os.environ | ENVIRONMENT,
        start_new_session=True,  # an interrupt ends the question, not the process
    )


def _exit_code(process: subprocess.Popen[bytes] | None) -> int | str:
    try:
        return process.wait(timeout=1) if process else "unknown"
    except subprocess.TimeoutExpired:
        return "unknown"


def _end_of(printed: IO[bytes]) -> str:
    """The last bytes, or what a C++ exception said before its stack."""
    with suppress(OSError, ValueError):  # closed by now
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - MOST_BYTES))
        text = printed.read().decode(errors="replace").strip()
        return plain(thrown[-1] if (thrown := THROWN.findall(text)) else text[-LAST_BYTES:])
    return ""


@atexit.register
def close() -> None:
    """End the server, if there is one."""
    while _servers:
        _servers.pop().close()


def _forget() -> None:
    """Forget the server in a fork of this process, which does not own it, and replace the lock, which nobody would
    release."""
    global _lock
    _lock = threading.Lock()
    _servers.clear()


if FORKS:
    os.register_at_fork(after_in_child=_forget)
