"""Executes cells on a rank that waits for them, in the namespace of its script: the last line of ranks_script.py calls
`serve`. What a cell prints goes to the rank's logs, as in any run; the notebook reads it there.

The guest's thread looks ten times a second for what the asker wants of a cell that is running.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, ClassVar

from labkit.files import is_only_writable_by, read_object, write_json
from labkit.record import RunFolder
from labkit.worker.cell_folder import CellAnswer, CellFolder
from labkit.worker.values import values_from, values_to

HOT_SECONDS, HOT_FOR_SECONDS = 0.004, 10.0  # between two looks for the next cell, and how long after the last one
COLD_SECONDS = 0.1
LOOKED_SECONDS = 1.0  # between two looks whether a notebook is there
CELL = "<ipython-input-"  # how IPython's compiler names the file of a cell
DISTRIBUTED = "/torch/distributed/"
# What gloo says once a group cannot be used any more, in a collective or in whatever waits for one.
GLOO = ("gloo/transport", "Application timeout caused pair closure")
INTERACTIVE = "application/vnd.jupyter.widget"  # a widget lives in a kernel, which a rank is not


def serve() -> None:
    """Execute cells until no notebook has looked for a while. Raises RuntimeError outside a run of labkit.ranks."""
    if Cells.current is None:
        raise RuntimeError("only ranks that labkit.ranks(…) has started wait for cells")
    Cells.current.serve()


class Cells:
    """One rank's cells. `ends_after`: seconds without a notebook."""

    current: ClassVar[Cells | None] = None

    def __init__(self, folder: RunFolder, rank: int, ends_after: float):
        self.serves = False
        self._folder, self._rank, self._ends_after = folder, rank, ends_after
        self._number = 1  # of the next cell
        self._running: CellFolder | None = None
        self._interrupted, self._interrupting = False, threading.Lock()
        self._main = threading.get_ident()
        self._shell: Any = None
        self._displays: dict[str, dict[str, Any]] = {}

    def serve(self) -> None:
        self._main, self._process = threading.get_ident(), os.getpid()
        self._shell = _shell(sys.modules["__main__"], self._folder.rank(self._rank) / "ipython", self._display)
        self._join = sys.modules["__main__"].__dict__["join_ranks"]
        sys.modules["__main__"].__dict__.pop("__file__", None)  # or IPython 7 would take it for the file of every cell
        sys.breakpointhook = _no_debugger
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a cell may be interrupted, and nothing else
        self.serves = True
        (self._folder.cells / f"ready-{self._rank}").touch(0o600)
        while (cell := self._next()) is not None:
            self._number += 1
            request = cell.request()
            if request["ranks"] is None or self._rank in request["ranks"]:
                self._execute(cell, request)
        self.serves = False

    def _next(self) -> CellFolder | None:
        """The next cell, once it is there; None when no notebook has looked for a while."""
        path, looked = f"{self._folder.cells}/{self._number}", f"{self._folder.cells}/looked"
        since = seen_at = polled = time.monotonic()
        seen = _changed(looked)
        while not os.path.exists(path):  # noqa: PTH110  # 250 times a second
            now = time.monotonic()
            if now - polled > LOOKED_SECONDS:
                polled = now
                if (newest := _changed(looked)) != seen:
                    seen, seen_at = newest, now
                elif now - seen_at > self._ends_after:
                    return None
            time.sleep(HOT_SECONDS if now - since < HOT_FOR_SECONDS else COLD_SECONDS)
        cell = CellFolder(self._folder.cells / str(self._number))
        if not is_only_writable_by(os.geteuid(), self._folder.cells, cell.path, cell.text):
            raise PermissionError(f"other users can write to {cell.path}, so the cell was not executed")
        return cell

    def _execute(self, cell: CellFolder, request: Any) -> None:
        kinds: dict[str, Callable[[CellFolder, Any], BaseException | None]] = {
            "cell": self._run,
            "load": self._load,
            "push": self._push,
            "pull": self._pull,
            "group": self._renew_group,
        }
        self._displays, self._interrupted = {}, False
        # so that join_ranks() does not meet what an earlier group has left in torchrun's store
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(self._number)
        cell.begin(self._rank, self._logs())
        signal.signal(signal.SIGINT, signal.default_int_handler)  # an earlier cell may have set another one
        self._running = cell
        error: BaseException | None
        try:
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                error = kinds[request["kind"]](cell, request)
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        except BaseException as failure:
            error = failure
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the interrupt may have come before the first one
        with self._interrupting:
            self._running = None
        if signal.SIGINT in signal.sigpending():  # it came too late, and must not end the next cell
            signal.sigwait({signal.SIGINT})
        self._answer(cell, error)

    def _answer(self, cell: CellFolder, error: BaseException | None) -> None:
        import torch.distributed as dist

        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the cell may have closed it, or put something else in its place
                stream.flush()
        if os.getpid() != self._process:  # the cell has forked, and this is no rank
            os._exit(0)
        answer = CellAnswer(
            grouped=dist.is_initialized(),
            collectives=_collectives(dist),
            logs=self._logs(),
            displays=tuple(self._displays.values()),
        )
        if error is not None:
            call = _call(error.__traceback__)
            answer = CellAnswer(
                **vars(answer)
                | {
                    "error": _in_a_line(error),
                    "line": error.lineno if isinstance(error, SyntaxError) else _line(error.__traceback__),
                    "call": call,
                    "broken": _is_of_group(error) or (call is not None and isinstance(error, KeyboardInterrupt)),
                }
            )
        cell.write_answer(self._rank, answer)

    # What is asked

    def _run(self, cell: CellFolder, request: Any) -> BaseException | None:
        self._shell.execution_count = request["count"] or self._number - 1  # tracebacks name it
        self._shell.is_quiet = request["text"].rstrip().endswith(";")
        done = self._shell.run_cell(request["text"])
        error: BaseException | None = done.error_before_exec or done.error_in_exec
        return error

    def _load(self, cell: CellFolder, request: Any) -> BaseException | None:
        """Define what a script defines, each of its cells as one of IPython's."""
        sys.argv[1:] = request["argv"]
        for text in request["cells"]:
            done = self._shell.run_cell(text)
            if error := done.error_before_exec or done.error_in_exec:
                return error  # type: ignore[no-any-return]
        return None

    def _push(self, cell: CellFolder, request: Any) -> None:
        self._shell.user_ns.update(values_from(cell.values))

    def _pull(self, cell: CellFolder, request: Any) -> None:
        content = values_to({request["text"]: self._shell.ev(request["text"])}, together=request["ranks"] is None)
        try:
            cell.values_of(self._rank).write_bytes(content)
        except OSError:  # a full disk, on which the answer must have room
            cell.values_of(self._rank).unlink(missing_ok=True)
            raise

    def _renew_group(self, cell: CellFolder, request: Any) -> None:
        """Join a new process group; the connections of the old one are closed, which ends whatever waits on them."""
        import torch.distributed as dist

        self._close_connections()
        if dist.is_initialized():
            with suppress(Exception):  # it is broken
                dist.destroy_process_group()
        self._join()

    def _close_connections(self) -> None:
        """Close the connections to other ranks of this machine. A group closes them when it is freed, which a mesh or a
        model that still refers to it delays."""
        import psutil

        beats = (read_object(self._folder.heartbeat(rank)) for rank in self._folder.started_ranks())
        others = {beat.get("pid") for beat in beats} - {os.getpid(), None}
        theirs = set()
        for pid in others:
            with suppress(psutil.Error):
                theirs |= {each.laddr for each in psutil.Process(pid).net_connections("tcp")}
        for own in psutil.Process().net_connections("tcp"):
            if own.raddr and own.raddr in theirs:
                with suppress(OSError), socket.socket(fileno=os.dup(own.fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)

    def _display(self, data: dict[str, Any], display_id: str | None = None) -> None:
        from base64 import b64encode

        shown = {
            kind: b64encode(content).decode() if isinstance(content, bytes) else content
            for kind, content in data.items()
            if not kind.startswith(INTERACTIVE)
        }
        json.dumps(shown)  # or raise, in the cell
        self._displays[display_id or str(len(self._displays))] = shown

    def _logs(self) -> tuple[int, int]:
        """The sizes of this rank's stdout and stderr."""
        out, err = (self._folder.log(self._rank, stream).stat().st_size for stream in ("stdout", "stderr"))
        return out, err

    # Called by another thread than the training's.

    def listen(self) -> None:
        """Do what the asker wants of the cell that is running."""
        cell = self._running
        if cell is None:
            return
        if cell.is_marked("interrupt") and not self._interrupted:
            with self._interrupting:
                if self._running is cell:  # and not a later one
                    self._interrupted = True
                    signal.pthread_kill(self._main, signal.SIGINT)
        if cell.is_marked("where") and not cell.place(self._rank).exists():
            frame = sys._current_frames().get(self._main)
            frames = []
            while frame is not None:
                frames.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno))
                frame = frame.f_back
            write_json(cell.place(self._rank), {"line": _line_of(reversed(frames)), "call": _call_of(reversed(frames))})


def _collectives(dist: Any) -> int:
    """How many collectives of the group of all ranks this rank has begun."""
    try:
        return int(dist.distributed_c10d._get_default_group()._get_sequence_number_for_group())
    except (AttributeError, RuntimeError, ValueError):  # another version of torch; no group
        return 0


def _changed(path: str) -> int:
    """When a file was last changed, by the clock of who changes it; 0 if it is not there."""
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116
    except OSError:
        return 0


def _no_debugger(*_: Any, **__: Any) -> None:
    raise RuntimeError("ranks have no terminal for a debugger; the next cell can look at every variable")


def _in_a_line(error: BaseException) -> str:
    text = _text(error.msg if isinstance(error, SyntaxError) else error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(error: object) -> str:
    try:
        return str(error)
    except Exception:  # of the user's own class
        return ""


def _is_of_group(error: BaseException) -> bool:
    """Whether it says that the process group cannot be used any more."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or any(words in _text(error) for words in GLOO)


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, str, int]]:
    """Files, functions and lines, the outermost first."""
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_frame.f_code.co_name, trace.tb_lineno
        trace = trace.tb_next


def _line(trace: TracebackType | None) -> int | None:
    return _line_of(_frames(trace))


def _line_of(frames: Iterator[tuple[str, str, int]]) -> int | None:
    """The cell's own line."""
    return next((line for file, _, line in frames if file.startswith(CELL)), None)


def _call(trace: TracebackType | None) -> str | None:
    return _call_of(_frames(trace))


def _call_of(frames: Iterator[tuple[str, str, int]]) -> str | None:
    """The outermost function of torch.distributed that waits for other ranks."""
    return next((n for file, n, _ in frames if DISTRIBUTED in file and not n.startswith(("_", "<", "wrapper"))), None)


def _shell(main: Any, folder: Any, display: Callable[..., None]) -> Any:
    """IPython's shell for cells in this module's namespace: it compiles and runs them, formats what they display and
    their tracebacks, and has its magics."""
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Publisher(DisplayPublisher):  # type: ignore[misc,unused-ignore]
        def publish(self, data: Any, metadata: Any = None, *_: Any, transient: Any = None, **__: Any) -> None:
            display(data, (transient or {}).get("display_id"))

        def clear_output(self, wait: bool = False) -> None:
            pass

    class Hook(DisplayHook):  # type: ignore[misc,unused-ignore]
        def start_displayhook(self) -> None:
            pass

        def write_output_prompt(self) -> None:
            pass

        def quiet(self) -> bool:
            shell: Any = self.shell
            return bool(shell.is_quiet)

        def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
            if [*format_dict] == ["text/plain"]:
                print(format_dict["text/plain"])
            else:
                display(format_dict)

        def finish_displayhook(self) -> None:
            pass

    class Shell(InteractiveShell):  # type: ignore[misc,unused-ignore]
        display_pub_class = Publisher
        displayhook_class = Hook
        is_quiet = False

        def enable_gui(self, gui: Any = None) -> None:
            pass

        def ask_exit(self) -> None:
            raise SystemExit("ranks.stop() ends the ranks")

    options = Config()
    options.HistoryManager.enabled = False
    options.InteractiveShell.cache_size = 0  # results would keep their tensors
    options.InteractiveShell.colors = "NoColor"
    options.InteractiveShell.user_module, options.InteractiveShell.user_ns = main, main.__dict__
    return Shell.instance(config=options, ipython_dir=str(folder), user_module=main, user_ns=main.__dict__)
