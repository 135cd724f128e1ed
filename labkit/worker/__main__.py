"""Wraps one rank: sets up its logs, records and error report, then runs the script as if it were alone.

torchrun starts `python -m labkit.worker <script> <arguments…>` once per rank. The script sees its own `sys.argv`,
its own folder first on the path, `__name__ == "__main__"`.
"""

from __future__ import annotations

import atexit
import linecache
import os
import sys
import threading
import types
from contextlib import suppress

from labkit.record.folder import RunFolder
from labkit.record.python_source import decoded, lines_of
from labkit.worker import failure, metrics_logger, process_setup
from labkit.worker.heartbeat import Heartbeat
from labkit.worker.measures.profile import VARIABLE
from labkit.worker.probe import Probe
from labkit.worker.reach.requests import Reach
from labkit.worker.reach.settings import Settings


def main() -> None:
    folder, rank = RunFolder(os.environ["LABKIT_RUN_DIR"]), int(os.environ["RANK"])
    folder.rank(rank).mkdir(parents=True, exist_ok=True)
    process_setup.redirect_output(folder, rank)
    process_setup.die_with_parent()
    process_setup.leave_no_core()
    process_setup.dump_stacks_on_signal(folder, rank)
    probe = Probe(folder.metrics(rank), folder.profile(rank) if os.environ.get(VARIABLE) == "1" else None)
    reported = metrics_logger.listen(probe.recorder)
    atexit.register(reported.flush, everything=True)  # registered before the script's handlers, so called after them
    probe.settings = Settings(None if rank else folder)
    if folder.requests.is_dir():
        world_size = int(os.environ["WORLD_SIZE"])
        probe.reach = Reach(folder, rank, world_size, probe.recorder, probe.settings, lambda: probe.step)
        probe.reach.start()
    Heartbeat(folder, rank, probe, reported).start()
    sys.argv = sys.argv[1:]
    process = os.getpid()
    code, outcome = 0, "finished"
    failed: BaseException | None = None
    try:
        probe.start()
        process_setup.release_before_destroying(sys.modules["torch"].distributed)
        # Only now: torch and its imports are loaded, so a `random.py` next to the script cannot shadow theirs.
        sys.path.insert(0, os.environ["LABKIT_SCRIPT_DIR"])
        os.environ.pop("PYTHONSAFEPATH", None)
        run(sys.argv[0], folder.script.read_bytes())
    except SystemExit as error:
        code, outcome, failed = failure.exit_code(error), "exited", error
    except BaseException as error:
        code, outcome, failed = 1, "raised", error
    try:
        if os.getpid() == process:  # a child that the script forked must not report for the rank
            if failed is not None and code != 0:
                failure.write(folder, rank, failed, probe.step)
            probe.finish(outcome)
        if failed is not None and outcome == "raised":
            failure.show(failed)
    finally:
        leave(code)


def run(path: str, source: bytes) -> None:
    """Execute the recorded source as the program at `path`; the file may have been edited since the launch."""
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    linecache.cache[path] = (len(source), None, lines_of(decoded(source)), path)
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def leave(code: int) -> None:
    """Exit the process without an interpreter shutdown: in torch 2.10 to 2.13 gloo's threads abort up to half of them,
    after the training has succeeded. Python's steps before that point still run, and cannot change `code`."""
    end_threads = threading._shutdown  # type: ignore[attr-defined]
    steps = (end_threads, atexit._run_exitfuncs, lambda: sys.stdout.flush(), lambda: sys.stderr.flush())
    try:
        for step in steps:
            with suppress(BaseException):  # a full disk, a stream that is closed or None, an interrupt
                step()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
