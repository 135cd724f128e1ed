"""Ask a process of its own what needs torch: the notebook's kernel never imports it, and what torch is made to believe
about tensors without data ends with that process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from labkit.errors import LabError, LaunchError
from labkit.record.text import plain

__all__ = ["Unplannable", "answer", "ask"]


class Unplannable(LabError):
    """The script is sound as far as one can tell, but cannot be run on tensors that hold no data."""


def ask(module: str, question: Mapping[str, Any]) -> Any:
    """What `python -m labkit.planner.<module>` answers.

    Raises LaunchError with the script's own words when it refuses its options, Unplannable when it cannot be planned.
    """
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",  # a plan needs no device, and must not hold the memory of one
        "OMP_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", f"labkit.planner.{module}"],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        env=environment,
    )
    try:
        reply = json.loads(done.stdout)
    except ValueError:
        last = plain(done.stderr.strip()[-500:]) or f"exit code {done.returncode}"
        raise Unplannable(f"the process that plans the script died: {last}") from None
    if "refused" in reply:
        raise LaunchError(plain(reply["refused"]))
    if "problem" in reply:
        raise Unplannable(plain(reply["problem"]))
    return reply["answer"]


def answer(function: Callable[..., Any]) -> None:
    """In the child: call `function` with the question's items, print what it returns or why it does not."""
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
    """The last line of the script that the error passed through."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == SCRIPT_FILE]
    return f"{SCRIPT_FILE}, line {lines[-1].lineno} ({(lines[-1].line or '').strip()}): " if lines else ""


SCRIPT_FILE = "script.py"
# Of torch's fake tensors. By their names: torch is not imported here.
DEPENDS_ON_DATA = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")
