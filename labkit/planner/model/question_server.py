"""Answers the questions of child.py: a server that imports torch once and forks a child for each question.

    python -m labkit.planner.model.question_server        (stdin: a socket of sockets, each with a file for output)
    python -m labkit.planner.model.question_server once   (stdin: the socket of one question)

The server ends when the process that asks does. A child is killed when the other end of its socket is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import linecache
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from labkit.planner.model.answers import Reads
from labkit.planner.model.libraries import import_for

PR_SET_PDEATHSIG = 1


def serve(control: socket.socket) -> None:
    """Answer questions until the process that asks ends."""
    _import_torch()
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes.fileno())
    children: dict[int, socket.socket] = {}  # each with the socket of its question
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if woken.fileno() in ready:
            woken.recv(1024)
        for child, question in list(children.items()):
            given_up = question.fileno() in ready
            if given_up:
                os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, 0 if given_up else os.WNOHANG)
            if ended:
                poll.unregister(question)
                _report_exit(children.pop(child), status)
        if control.fileno() in ready:
            message, files, *_ = socket.recv_fds(control, 1, 2, socket.MSG_CMSG_CLOEXEC)
            if not message:
                return  # children end with this process
            if len(files) < 2:  # no descriptors are left
                for descriptor in files:
                    os.close(descriptor)
                continue
            question, printed = socket.socket(fileno=files[0]), files[1]
            request = _request_of(question)
            _prepare(request)
            child = os.fork()
            if not child:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for inherited in (control, woken, wakes, *children.values()):
                    inherited.close()
                os.dup2(printed, 1)
                os.dup2(printed, 2)
                answer(question, request)
            os.close(printed)
            children[child] = question
            poll.register(question, 0)  # tells only that the other end was closed


def _import_torch() -> None:
    """Import once what every child needs, which takes longer than most answers."""
    gc.disable()  # the import allocates much and frees little: a fifth of its time
    import torch._dynamo  # noqa: F401, which the first optimizer imports

    import labkit.planner.model.fake.fake_run
    import labkit.planner.model.rehearsal  # noqa: F401

    gc.enable()
    gc.freeze()  # children share what is never collected


def _request_of(question: socket.socket) -> Any:
    """What is asked; nothing if the process that asks gave up."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(question.makefile("rb").readline())
    return {}


def _prepare(request: Any) -> None:
    """Import what the script asked about imports."""
    asked = request.get("question", {})
    if "text" in asked:
        script = asked.get("path")
        import_for(asked["text"], Path(script).parent if script else Path(request["folder"]))


def _report_exit(question: socket.socket, status: int) -> None:
    """Append the child's exit code to its reply and end the reply, whoever else still holds the socket."""
    with question, contextlib.suppress(OSError):
        question.sendall(f"\n{os.waitstatus_to_exitcode(status)}".encode())
        question.shutdown(socket.SHUT_RDWR)


def answer(question: socket.socket, request: Any) -> None:
    """Answer one question and exit."""
    from labkit.planner.model.fake.fake_run import FakeRun

    module, _, name = request["function"].rpartition(".")
    reads = Reads()
    try:
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        function = getattr(importlib.import_module(f"labkit.planner.model.{module}"), name)
        result: dict[str, Any] = {"answer": function(**request["question"])}
        result["reads"] = reads.all(FakeRun.options)
    except SystemExit as error:
        result = {"refused": str(error)}
    except Exception as error:
        result = {"problem": _where(error) + _why(error), "signature": signature(error)}
    question.sendall(json.dumps(result).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # fake process groups need no clean-up


def _why(error: Exception) -> str:
    from labkit.planner.model.fake.fake_run import DEPENDS_ON_DATA

    if type(error).__name__ in DEPENDS_ON_DATA:
        packet = getattr(getattr(error, "func", None), "overloadpacket", None)
        name = getattr(packet, "__name__", "the result")
        what = {"_local_scalar_dense": "a number, list or condition read from a tensor", "_unique2": "unique"}
        remedy = {"bincount": "pass minlength", "repeat_interleave": "pass output_size"}
        why = f"{what.get(name, name)} depends on values, but tensors in a plan have none"
        return f"{why}; {remedy.get(name, 'plan a copy of the model without this line')}"
    if "SparseTensorImpl" in str(error):
        return (
            "the formulas do not cover sparse gradients (sparse=True); a rehearsal assumes that all their rows differ"
        )
    return f"{type(error).__name__}: {str(error).strip()}"


def signature(error: Exception) -> str:
    """The type of an error and the last line outside torch and labkit that led to it, whatever the message, which
    differs without data; "" if only tensors without data, or only this machine, may have such an error."""
    import torch

    from labkit.planner.model.fake.fake_run import DEPENDS_ON_DATA

    ours = str(Path(__file__).parents[2])
    within = (*(f"{folder}{os.sep}" for folder in (ours, *torch.__path__)), contextlib.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{f.filename}:{f.lineno}" for f in frames if not f.filename.startswith(within)]
    elsewhere = type(error).__name__ in DEPENDS_ON_DATA or isinstance(error, OSError | ImportError)
    return "" if elsewhere or not lines else f"{type(error).__name__}, {lines[-1]}"


def _where(error: BaseException) -> str:
    """The last line of the script in the traceback, numbered within its cell."""
    from labkit.planner.model.fake.fake_run import SCRIPT_FILE

    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == SCRIPT_FILE]
    if not lines:
        return ""
    number = lines[-1].lineno or 0
    text = enumerate(linecache.getlines(SCRIPT_FILE)[:number], 1)
    above = [(n, line) for n, line in text if line.startswith("# %% ")]
    where = f"the {above[-1][1][5:].strip()!r} cell, line {number - above[-1][0]}" if above else f"line {number}"
    return f"{where} ({(lines[-1].line or '').strip()}): "


if __name__ == "__main__":
    stdin = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # scripts read nothing
    if "once" in sys.argv:
        answer(stdin, _request_of(stdin))
    serve(stdin)
    os._exit(0)  # nothing to clean up
