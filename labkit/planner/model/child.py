"""Ask a process of its own what needs torch: the notebook's kernel never imports it, and what torch is made to believe
about tensors without data ends with that process.
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
_children: dict[subprocess.Popen[str], str] = {}  # that run, and the thread that waits for each


class Unplannable(LabError):
    """The script is sound as far as one can tell, but cannot be run on tensors that hold no data."""


@contextmanager
def asking() -> Iterator[ThreadPoolExecutor]:
    """Threads to ask from. On an error or an interrupt nobody waits for the answers: their processes are ended."""
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
    """What `python -m labkit.planner.<module>` answers.

    Raises LaunchError with the script's own words when it refuses its options, Unplannable when it cannot be planned.
    """
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",  # a plan needs no device, and must not hold the memory of one
        "OMP_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",
    }
    child = subprocess.Popen(
        [sys.executable, "-m", f"labkit.planner.{module}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with child:
        _children[child] = threading.current_thread().name
        try:
            said, printed = child.communicate(json.dumps(question))
        except BaseException:
            child.kill()
            raise
        finally:
            del _children[child]
    try:
        reply = json.loads(said)
    except ValueError:
        last = plain(printed.strip()[-500:]) or f"exit code {child.returncode}"
        raise Unplannable(f"the process that plans the script died: {last}") from None
    if "refused" in reply:
        raise LaunchError(plain(reply["refused"]))
    if "problem" in reply:
        raise Unplannable(plain(reply["problem"]))
    return reply["answer"]


def answer(function: Callable[..., Any]) -> None:
    """In the child: call `function` with the question's items, print what it returns or why it does not."""
    if sys.platform == "linux":  # nobody is left to hear the answer when the asking thread is gone
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with os.fdopen(os.dup(1), "w") as reply:
        os.dup2(2, 1)  # what the script prints while it is loaded is no answer
        try:
            said: dict[str, Any] = {"answer": function(**json.load(sys.stdin))}
        except SystemExit as error:
            said = {"refused": str(error)}
        except Exception as error:
            said = {"problem": _where(error) + _why(error)}
        json.dump(said, reply)
    sys.stderr.flush()
    os._exit(0)  # process groups made of nothing do not care to be destroyed


def _why(error: Exception) -> str:
    if type(error).__name__ in DEPENDS_ON_DATA:
        return "what follows depends on a tensor's values, and a plan's tensors have none"
    return f"{type(error).__name__}: {str(error).strip()}"


def _where(error: BaseException) -> str:
    """The last line of the script that the error passed through, as its author counts it: within its cell."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == SCRIPT_FILE]
    if not lines:
        return ""
    number = lines[-1].lineno or 0
    text = enumerate(linecache.getlines(SCRIPT_FILE)[:number], 1)
    above = [(n, line) for n, line in text if line.startswith("# %% ")]
    where = f"the {above[-1][1][5:].strip()!r} cell, line {number - above[-1][0]}" if above else f"line {number}"
    return f"{where} ({(lines[-1].line or '').strip()}): "


SCRIPT_FILE = "script.py"
# Of torch's fake tensors. By their names: torch is not imported here.
DEPENDS_ON_DATA = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")
