"""Wrap one rank: its logs, its records, its last words; then run the script as if it were alone.

torchrun starts `python -m labkit.worker <script> <arguments…>` once per rank. The script sees its own `sys.argv`,
its own folder on the path, `__name__ == "__main__"`.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
from pathlib import Path

from labkit.record.folder import RunFolder
from labkit.worker import failure, guard
from labkit.worker.probe import Probe


def main() -> None:
    folder, rank = RunFolder(os.environ["LABKIT_RUN_DIR"]), int(os.environ["RANK"])
    folder.rank(rank).mkdir(parents=True, exist_ok=True)
    guard.redirect_output(folder, rank)
    guard.die_with_parent()
    guard.dump_stacks_on_signal(folder, rank)
    probe = Probe(folder.metrics(rank))
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    # At the end: a `random.py` beside the script must not hide Python's own.
    sys.path.append(str(Path(os.environ.get("LABKIT_SCRIPT_DIR", script)).resolve()))
    code = 1
    try:
        probe.start()
        runpy.run_path(script, run_name="__main__")
        code = 0
        probe.finish("finished")
    except SystemExit as error:
        code = failure.exit_code(error)
        probe.finish("exited")
        if code != 0:
            failure.write(folder, rank, error, probe.step)
    except BaseException as error:
        probe.finish("raised")
        failure.write(folder, rank, error, probe.step)
    leave(code)


def leave(code: int) -> None:
    """End the process here. gloo's threads abort up to half of all interpreter shutdowns in torch 2.10 to 2.13,
    after the training has succeeded; what Python does before that point still happens."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
