"""Run what needs torch in a child process: the notebook's kernel never imports torch, and the patches for tensors
without data end with the child.
"""

from __future__ import annotations

import ctypes
import json
import linecache
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from labkit.errors import LabError, LaunchError
from labkit.record.text import plain

__all__ = ["Unplannable", "answer", "ask", "asking"]

PR_SET_PDEATHSIG = 1
_children: dict[subprocess.Popen[str], str] = {}  # running children, with the name of the thread that waits for each


class Unplannable(LabError):
    """The script seems valid but cannot run on tensors without data."""


@contextmanager
def asking() -> Iterator[ThreadPoolExecutor]:
    """A thread pool for `ask`. On an error or an interrupt, the children of its threads are killed."""
    name = f"labkit asks {os.urandom(4).hex()}"
    with ThreadPoolExecutor(thread_name_prefix=name) as threads:
        try:
            yield threads
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for child, waiting in list(_children.items()):
                if waiting.startswith(name):
                    child.kill()
            raise


def ask(module: str, question: Mapping[str, Any]) -> Any:
    """The answer of `python -m labkit.planner.model.<module>`.

    Raises LaunchError with the script's own message if it refuses its options, Unplannable if it cannot be planned.
    """
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",  # a plan needs no device and must not occupy one
        "OMP_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",
    }
    child = subprocess.Popen(
        [sys.executable, "-m", f"labkit.planner.model.{module}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with child:
        _children[child] = threading.current_thread().name
        try:
            output, errors = child.communicate(json.dumps(question))
        except BaseException:
            child.kill()
            raise
        finally:
            del _children[child]
    try:
        reply = json.loads(output)
    except ValueError:
        last = plain(errors.strip()[-500:]) or f"exit code {child.returncode}"
        raise Unplannable(f"the process that plans the script died: {last}") from None
    if "refused" in reply:
        raise LaunchError(plain(reply["refused"]))
    if "problem" in reply:
        raise Unplannable(plain(reply["problem"]))
    return reply["answer"]


def answer(function: Callable[..., Any]) -> None:
    """In the child: call `function` with the question's items and print its result or its error."""
    if sys.platform == "linux":  # end with the parent thread
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with os.fdopen(os.dup(1), "w") as reply:
        os.dup2(2, 1)  # keep what the script prints out of the reply
        try:
            result: dict[str, Any] = {"answer": function(**json.load(sys.stdin))}
        except SystemExit as error:
            result = {"refused": str(error)}
        except Exception as error:
            result = {"problem": _where(error) + _why(error)}
        json.dump(result, reply)
    sys.stderr.flush()
    os._exit(0)  # fake process groups need no clean-up


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


SCRIPT_FILE = "script.py"
# Exceptions of torch's fake tensors, by name because torch is not imported here.
DEPENDS_ON_DATA = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")
