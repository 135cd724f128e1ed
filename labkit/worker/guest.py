"""Acts as a rank's guest: in a training script's interpreter, from before its first line until after its last.

torchrun starts `python -u RUN/guest.pyc train.py …` for each rank; warm/process.py of the launcher makes that file.
Until the script imports torch, or asks for the logger of its metrics, the guest needs only modules that every
interpreter has loaded at its start, a thread that `threading` does not know, and descriptors far above the script's:
the script sees what bare Python and torchrun let it see. Then it loads the rest of this package (recording.py).

The frames of this file are invisible. So the script's module is the outermost frame, its errors reach the interpreter
as they are, and the interpreter itself reports them, ends threads, calls atexit's handlers, closes files and exits.
"""

import _signal  # type: ignore[import-not-found]
import _thread
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import CodeType, FrameType
    from typing import Any

    from labkit.rank_files import RankFile
    from labkit.worker.recording import Recording

importing: "Any" = sys.modules["_frozen_importlib"]
loaders: "Any" = sys.modules["_frozen_importlib_external"]

BEAT_SECONDS = 1.0
BUSY_BEATS = 10
CRASHES = ("SEGV", "BUS", "FPE", "ILL", "ABRT")
LISTEN_SECONDS = 0.1  # between two looks for requests of the run's owner
LONGEST_DOING, LONGEST_BYTES = 80, 100  # of a text, and of one in a heartbeat, which must fit its file
# The newest collective's thread needs the GIL to free it. If it still waits for the GIL when the interpreter is
# finalized, it aborts the process: in torch 2.10 to 2.13 up to half of all gloo ranks, after they have succeeded.
HANDOVER_SECONDS = 0.02
# What a rank is doing while one of these functions, or a function of these modules, is running.
STARTING_CALLS = {
    "init_process_group": "joining the process group",
    "fully_shard": "sharding the model",
    "from_pretrained": "loading pretrained weights",
    "load_state_dict": "loading weights",
}
BACKWARD = "_engine_run_backward"
WAITING = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")
POOL = "/multiprocessing/pool.py"
UNNAMED = ("default_pg", "undefined", "")  # torch's own descriptions of groups
STARTING_MODULES = {
    "torch.nn.parallel.distributed": "wrapping the model in DDP",
    "torch.distributed.fsdp": "sharding the model",
    "torch._dynamo": "compiling the model",
    "torch._inductor": "compiling the model",
}
# What has the classes that trackers.CALLS observes.
TRACKERS = (
    "torch.utils.tensorboard.writer",
    "tensorboardX.writer",
    "wandb.sdk.wandb_run",
    "wandb.sdk.lib.noop_run",
    "trackio.run",
    "mlflow.tracking.client",
    "accelerate.accelerator",
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector",
    "pytorch_lightning.trainer.connectors.logger_connector.logger_connector",
    "transformers.trainer_callback",
)


def main() -> None:
    """Be the guest of the script `sys.argv[1:]`: `train.py …`, or `-m package.module …`."""
    guest = Guest(*sys.argv)
    guest.start()
    try:
        run, arguments = guest.program()
        run(*arguments)
        guest.outcome = "finished"
    except BaseException as error:
        guest.failed(error)
        raise


class Guest:
    """The guest of one rank. `recording` observes the training, once there is something to observe."""

    def __init__(self, file: str, *words: str) -> None:
        self.labkit = main.__code__.co_filename.rpartition("/worker/")[0]  # the package's folder
        self.files: Any = self._module("labkit.rank_files")
        self.file, self.words, self.started_words = file, [*words], [*words[:2]]
        self.pid, self.agent, self.main_thread = os.getpid(), os.getppid(), _thread.get_ident()
        hidden = [*os.environ.get(self.files.HIDDEN, "").split(","), *filter(self._is_setting, os.environ)]
        self.settings = {name: os.environ.pop(name) for name in hidden if name in os.environ}
        self.folder = self.settings[self.files.FOLDER]
        self.places = {name: int(os.environ[name.upper()]) for name in ("rank", "local_rank", "world_size")}
        self.home = f"{self.folder}/{self.files.RANKS}/{self.places['rank']}"
        self.started = time.monotonic()
        self.paths = sys.path if sys.flags.safe_path else sys.path[1:]  # without the script's own folder
        self.script = ""  # the file whose lines are the script's
        self.recording: Recording | None = None
        self.trackers: list[Any] = []  # modules that are to be observed once torch is
        self.problem = ""  # why nothing is recorded
        self.outcome = ""  # of the script: "finished", "raised" or "exited"
        self.last: int | None = None  # the script's line in which it raised or exited
        self.answered = 0  # the newest inquiry
        self.function = "", 0.0  # of the script, that the main thread is in, and since when
        self.used: list[tuple[float, float]] = []  # at the newest heartbeats: the time, and the process's CPU seconds
        self.thread = 0  # its own, as the system numbers it
        self.has_ended = _thread.allocate_lock()

    def _is_setting(self, name: str) -> bool:
        return name.startswith(self.files.GUEST)

    def _module(self, name: str) -> "Any":
        """One of labkit's modules from its file, without a trace in `sys.modules`."""
        module = type(sys)(name)
        path = f"{self.labkit}/{name.partition('.')[2].replace('.', '/')}.py"
        exec(loaders.SourceFileLoader(name, path).get_code(name), module.__dict__)
        return module

    def start(self) -> None:
        """Do all that must happen before the script's first line."""
        builtin = {"atexit", "faulthandler"} - sys.modules.keys()
        import atexit
        import faulthandler

        os.makedirs(self.home, exist_ok=True)
        for descriptor, stream in ((1, "stdout"), (2, "stderr")):  # including that of C code
            file = os.open(f"{self.home}/{stream}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, descriptor)
            os.close(file)
        self.heartbeat: RankFile = self.files.RankFile(f"{self.home}/{self.files.HEARTBEAT}", os.O_WRONLY | os.O_CREAT)
        self.stacks: RankFile = self.files.RankFile(f"{self.home}/{self.files.STACKS}")
        self.faulthandler = faulthandler
        if not faulthandler.is_enabled():  # on stderr, by PYTHONFAULTHANDLER
            faulthandler.enable(self.stacks.descriptor)
        self._dump_on_signal()
        atexit.register(self.end)  # the first to be registered is the last to be called
        for name in builtin:  # a script that imports them gets the same
            del sys.modules[name]
        os.register_at_fork(after_in_child=self.leave)
        self.finder, self.is_fork = Finder(dict.fromkeys(TRACKERS, self.track)), "torch" in sys.modules
        if self.is_fork:  # of a process that has imported both
            self.hear(sys.modules["logging"])
            self.observe(sys.modules["torch"])
        else:
            self.finder.awaited.update(logging=self.hear, torch=self.observe)
        sys.meta_path.insert(0, self.finder)
        os.execv, os.execve = self._surviving(os.execv), self._surviving(os.execve)  # type: ignore[assignment]
        self.has_ended.acquire()
        has_begun = _thread.allocate_lock()
        has_begun.acquire()
        of_a_thread = {self.files.DUMP_SIGNAL, *(getattr(_signal, f"SIG{name}") for name in CRASHES)}
        blocked = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals() - of_a_thread)
        _thread.start_new_thread(self.live, (has_begun,))  # a signal that the script blocks shall find no other thread
        _signal.pthread_sigmask(_signal.SIG_SETMASK, blocked)
        has_begun.acquire()  # the script may take the GIL and keep it

    def _dump_on_signal(self) -> None:
        """Have all threads' stacks dumped on a signal, even while C code holds the GIL."""
        if sys.platform == "linux":
            self.faulthandler.register(self.files.DUMP_SIGNAL, self.stacks.descriptor, all_threads=True)

    # The script

    def program(self) -> "tuple[Callable[..., object], tuple[Any, ...]]":
        """The call that runs the script as Python would: a module, a folder or archive with a `__main__.py`, or a file,
        of which the recorded text is run, because the file may have been edited since the launch."""
        main = sys.modules["__main__"] = type(sys)("__main__")
        main.__loader__, builtins = importing.BuiltinImporter, sys.modules["builtins"]
        main.__dict__.update(__annotations__={}, __builtins__=builtins)
        sys.argv = self.words
        if self.words[0] == "-m":
            module = self.words.pop(1)
            self._put_first(os.getcwd())
            return run_module(module, alter_argv=True)
        self.script = os.path.join(os.getcwd(), self.words[0])
        if loaders.PathFinder._path_importer_cache(self.script) is not None:  # Python asks the same
            sys.path[:] = [self.script, *self.paths]
            return run_module("__main__", alter_argv=False)
        self._put_first(self.settings.get(self.files.MODULES) or os.path.dirname(os.path.realpath(self.script)))
        with open(f"{self.folder}/{self.files.SCRIPT}", "rb", buffering=0) as file:
            text = file.readall()
        main.__loader__ = loaders.SourceFileLoader("__main__", self.script)
        main.__dict__.update(__file__=self.script, __cached__=None)
        return exec, (compile(text, self.script, "exec", dont_inherit=True), main.__dict__)

    def _put_first(self, folder: str) -> None:
        sys.path[:] = self.paths if sys.flags.safe_path else [folder, *self.paths]

    def _surviving(self, execute: "Callable[..., None]") -> "Callable[..., None]":
        """`os.execv` or `os.execve`, after which the script has its guest again, if it starts itself."""

        def call(*arguments: "Any", **named: "Any") -> None:
            try:
                again = self._with_guest(*arguments, **named) if os.getpid() == self.pid else ()
            except TypeError:  # what `execute` will refuse, or a file descriptor
                again = ()
            if not again:
                return execute(*arguments, **named)
            os.environ.update(self.settings)
            try:
                execute(*again)
            finally:  # exec has failed
                for name in self.settings:
                    os.environ.pop(name, None)

        call.__name__ = execute.__name__
        return call

    def _with_guest(self, path: "Any", argv: "Any", env: "Any" = None) -> "tuple[Any, ...]":
        """What to start instead, so that the script has its guest again; empty if that is another program."""
        words = [*map(os.fsdecode, argv)] if isinstance(argv, (list, tuple)) else []
        place = first_word(words)
        program = [word for word in words[place:] if word != self.file]
        if not place or os.fsdecode(path) != sys.executable or not self._is_own(program):
            return ()
        words[place:] = [self.file, *program]
        if env is None:
            return path, words
        return (path, words, {**env, **self.settings}) if "RANK" in env else ()

    def _is_own(self, program: list[str]) -> bool:
        """Whether Python would start this rank's script with these words."""
        if not self.script or program[:1] == ["-m"]:
            return program[:2] == self.started_words
        return os.path.realpath(program[0]) == os.path.realpath(self.script)

    def observe(self, torch: "Any") -> None:
        """Called when torch has been imported."""
        self._attempt(lambda recording: recording.observe(torch))
        self._attempt(lambda recording: recording.track(self.trackers))

    def track(self, module: "Any") -> None:
        """Called when a module has been imported to which a script logs numbers."""
        self.trackers.append(module)
        if self.recording is not None:
            self._attempt(lambda recording: recording.track(self.trackers))

    def hear(self, logging: "Any") -> None:
        """Called when logging has been imported. The logger of the script's metrics is not made before the script asks
        for it: `logging.config` disables those that exist."""
        manager = logging.Logger.manager
        get_logger = manager.getLogger

        def call(name: str) -> "Any":
            logger = get_logger(name)
            if name == "metrics" and os.getpid() == self.pid:
                self._attempt(lambda recording: recording.hear(logger))
            return logger

        manager.getLogger = call

    def _attempt(self, task: "Callable[[Recording], None]") -> None:
        """Record, if that is possible; it must not fail the training."""
        try:
            if self.recording is None:
                host = self.settings.get(self.files.HOST) or os.uname().nodename
                header = {"time": time.time(), "host": host, "pid": self.pid, "forked": self.is_fork} | self.places
                module = self._import("labkit.worker.recording")
                self.recording = module.Recording(self.folder, self.settings, header)
                self.problem = ""  # of an earlier attempt, before the script imported torch
            task(self.recording)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"

    def _import(self, name: str) -> "Any":
        """A module of labkit, which does not depend on `sys.path`. Raises ImportError if the script has another module
        of the name labkit."""
        if "labkit" not in sys.modules:
            search = [self.labkit]
            spec = loaders.spec_from_file_location(
                "labkit", f"{self.labkit}/__init__.py", submodule_search_locations=search
            )
            importing._load(spec)
            sys.modules[self.files.__name__] = self.files
        folders = [*getattr(sys.modules["labkit"], "__path__", [""])]
        if os.path.realpath(folders[0]) != os.path.realpath(self.labkit):
            raise ImportError("the script's own module labkit hides labkit")
        return __import__(name, fromlist=["*"])

    def failed(self, error: BaseException) -> None:
        """Record how the script failed, before the interpreter reports it."""
        if os.getpid() != self.pid:  # a child that the script has forked
            return
        self.outcome = "exited" if isinstance(error, SystemExit) else "raised"
        trace = error.__traceback__
        call: dict[str, Any] = {}
        while trace is not None:
            is_own = trace.tb_frame.f_code.co_filename == self.script
            self.last, call = (trace.tb_lineno, {}) if is_own else (self.last, call or call_of(trace.tb_frame))
            trace = trace.tb_next
        reason = error.code if isinstance(error, SystemExit) else error
        if reason is None or (isinstance(reason, int) and reason & 0xFF == 0):
            return
        try:
            message = str(reason)
        except BaseException:  # the same text as the traceback module's
            message = "<exception str() failed>"
        record = {
            "time_ns": time.time_ns(),
            "rank": self.places["rank"],
            "pid": self.pid,
            "step": self.step,
            "kind": "exit" if self.outcome == "exited" else "exception",
            "exception": type(error).__name__,
            "message": message,
            "script_line": self.last,
            **call,
        }
        paths, sys.path = sys.path, self.paths  # nothing next to the script may take the place of what this imports
        try:
            self._write_failure(record, error)
        finally:
            sys.path = paths

    def _write_failure(self, record: "Mapping[str, Any]", error: BaseException) -> None:
        """Write all that can be known, or the least that must be."""
        for _ in range(2):  # once a DataLoader's worker dies, torch's handler of SIGCHLD may raise here
            try:
                self._import("labkit.worker.failure").write(record, error, self.folder, self.script)
                return
            except Exception:
                pass  # a module of the script's hides Python's own, or a full disk
        try:
            file = os.open(f"{self.home}/{self.files.ERROR}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.write(file, as_json(record))
            os.close(file)
        except OSError:
            pass  # the cause is then derived from what the rank has printed

    def end(self) -> None:
        """Write the last words. atexit calls this once the script's threads have ended, after all of its handlers."""
        if os.getpid() != self.pid:
            return
        if self.recording is not None:
            self.recording.end(self.outcome, self.last)
            time.sleep(HANDOVER_SECONDS)
        else:
            record = {
                "k": "end",
                "t": time.monotonic(),
                "step": 0,
                "outcome": self.outcome,
                "dropped": 0,
                **({"line": self.last} if self.last else {}),
            }
            try:
                self.files.RankFile(f"{self.home}/{self.files.METRICS}").write(as_json(record))
                if self.problem:
                    self.beat()
            except OSError:
                pass  # a full disk
        self.has_ended.release()

    def leave(self) -> None:
        """Stop observing in a child that the script has forked, which is not the rank."""
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        self.heartbeat.let_go()
        self.stacks.keep_in_memory()  # faulthandler's handler of the signal is inherited
        if self.recording is not None:
            self.recording.leave()

    @property
    def step(self) -> int:
        return 0 if self.recording is None else self.recording.probe.step

    # The thread

    def live(self, has_begun: "_thread.LockType") -> None:
        """Write a heartbeat once a second, answer inquiries and look for requests, until the script has ended."""
        self.thread, due = _thread.get_native_id(), time.monotonic() + BEAT_SECONDS
        try:
            self.beat()
        except Exception:
            pass  # a full disk
        has_begun.release()
        while not self.has_ended.acquire(timeout=LISTEN_SECONDS):
            if os.getppid() != self.agent:
                os.kill(self.pid, _signal.SIGKILL)  # torchrun was killed: without it nobody would end this rank
            tasks = [self.recording.listen] if self.recording is not None else []
            if time.monotonic() >= due:
                due = time.monotonic() + BEAT_SECONDS
                tasks += [self.answer, self.beat]
            for task in tasks:
                try:
                    task()
                except Exception:
                    pass  # a full disk, a deleted folder, another version of torch

    def beat(self) -> None:
        """Write the heartbeat, whatever the script is doing."""
        beat = {
            "t": time.monotonic(),
            "pid": self.pid,
            "thread": self.thread,
            "step": 0,
            "doing": "preparing",
            "moved": self.started,
            "outcome": self.outcome,
            "answered": self.answered,
            # A script may handle the signal itself.
            "dumps": sys.platform == "linux" and _signal.getsignal(self.files.DUMP_SIGNAL) == _signal.SIG_DFL,
        }
        if self.recording is not None:
            self._attempt(lambda recording: beat.update(recording.beat()))
        if self.problem:
            beat["problem"] = self.problem[:LONGEST_DOING]
        if not beat["step"]:
            beat["starting"] = doing_now(self.main_thread, self.script)
        place = whereabouts(self.main_thread, self.script)
        if place["function"] != self.function[0]:
            self.function = place["function"], beat["t"]
        beat.update(place, since=max(self.function[1], beat["moved"]), busy=self.busy())
        if self.stacks.keep_open():
            self._dump_on_signal()  # not on a crash: that may be the script's own by now
        texts = {name: cut(value) for name, value in beat.items() if isinstance(value, str)}
        self.heartbeat.overwrite(as_json(beat | texts).rstrip().ljust(self.files.HEARTBEAT_BYTES - 1) + b"\n")

    def busy(self) -> float:
        """The share of one core that this process has used in the last ten seconds."""
        self.used = [*self.used[-BUSY_BEATS:], (time.monotonic(), time.process_time())]
        (since, before), (now, used) = self.used[0], self.used[-1]
        return round((used - before) / (now - since), 2) if now > since else 0.0

    def answer(self) -> None:
        """Dump all stacks if somebody has asked where the ranks are."""
        try:
            with open(f"{self.folder}/{self.files.INQUIRY}", "rb", buffering=0) as file:
                number = int(bytes(filter(b"0123456789".__contains__, file.readall())))
        except (OSError, ValueError):
            return
        if number == self.answered:
            return
        self.stacks.write(f"\n# {time.strftime('%H:%M:%S')}, step {self.step}\n".encode())
        self.faulthandler.dump_traceback(self.stacks.descriptor, all_threads=True)
        if self.recording is not None:
            self.recording.write_collectives()
        self.answered = number  # reported by the next beat, when everything is written


class Finder:
    """On `sys.meta_path`: finds these modules as the other finders do, and calls the function that awaits each once it
    has been imported."""

    def __init__(self, awaited: "dict[str, Callable[[Any], None]]") -> None:
        self.awaited = awaited

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in self.awaited:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec: Any = next(filter(None, specs), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            loader, load = spec.loader, spec.loader.exec_module

            def exec_module(module: "Any") -> None:
                del loader.exec_module
                load(module)
                if self in sys.meta_path and (has_imported := self.awaited.pop(name, None)):
                    has_imported(module)

            loader.exec_module = exec_module
        return spec


def run_module(name: str, *, alter_argv: bool) -> "tuple[Callable[..., object], tuple[Any, ...]]":
    """What the interpreter calls for `-m`, for folders and for archives."""
    import runpy

    return runpy._run_module_as_main, (name, alter_argv)  # type: ignore[attr-defined]


def first_word(command: list[str]) -> int:
    """Where in a command of Python's the script is, or `-m`; 0 if it starts neither, or not as a word of its own."""
    place = 1
    while place < len(command) and command[place].startswith("-") and command[place] != "-m":
        if command[place][:2] not in ("-X", "-W") and command[place].strip("-bBdEhiIOPqsSuvx"):
            return 0
        place += 2 if command[place] in ("-X", "-W") else 1
    return place if place < len(command) else 0


def as_json(record: "Mapping[str, Any]") -> bytes:
    """A record of numbers and texts as a line of JSON; what cannot be written as it is, is replaced."""
    texts = []
    for name, value in record.items():
        if isinstance(value, str):
            plain = "".join([c if c >= " " else "?" for c in value.encode("utf-8", "replace").decode()])
            text = '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
        else:
            text = "null" if value is None else repr(value).lower() if isinstance(value, bool) else repr(value)
        texts.append(f'"{name}": {text}')
    return ("{" + ", ".join(texts) + "}\n").encode()


def cut(text: str) -> str:
    return text.encode("utf-8", "replace")[:LONGEST_BYTES].decode("utf-8", "ignore")


def doing_now(thread: int, script: str) -> str:
    """`importing transformers` · `joining the process group` · `line 40, in build`; at most 80 characters, empty if
    unknown. It takes the outermost call that is known, because what this calls in turn is a detail."""
    frame = sys._current_frames().get(thread)
    stack: list[FrameType] = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    words = [words for words in map(starting_words, reversed(stack)) if words][:1]
    own = [frame for frame in stack if frame.f_code.co_filename == script][:1]
    if not words and own:
        name = own[0].f_code.co_name
        words = [f"line {own[0].f_lineno}" + ("" if name == "<module>" else f", in {name}")]
    return "".join(words)[:LONGEST_DOING]


def whereabouts(thread: int, script: str) -> "dict[str, Any]":
    """The script's line that a thread is in, 0 if it is in none, the function of this line, and whether it is in a
    function of torch that waits for other ranks: a collective, which is its `call`, or a backward pass. `pooled`: it
    waits for a multiprocessing.Pool."""
    frame, waits = sys._current_frames().get(thread), False
    call: dict[str, Any] = {}
    pooled = False
    while frame is not None and not is_function_of(frame.f_code, script):
        waits = waits or frame.f_code.co_filename.endswith(WAITING) or frame.f_code.co_name == BACKWARD
        pooled = pooled or (frame.f_code.co_filename.endswith(POOL) and is_of_processes(frame.f_locals.get("self")))
        call = call_of(frame) or call
        frame = frame.f_back
    function = frame.f_code.co_name[:LONGEST_DOING] if frame is not None else ""
    line = frame.f_lineno if frame is not None else 0
    return {"line": line, "function": function, "waits": waits, "pooled": pooled} | call


def is_of_processes(pooled: object) -> bool:
    """Whether this is a multiprocessing.Pool or a result of one, and not of a ThreadPool."""
    return "Pool" in (type(pooled).__name__, type(getattr(pooled, "_pool", None)).__name__)


def call_of(frame: "FrameType") -> "dict[str, Any]":
    """`{"call": "`recv` from rank 1 with tag 2", "peer": 1}` of a function of torch that communicates, the peer of a
    message; otherwise empty."""
    name = frame.f_code.co_name
    if not frame.f_code.co_filename.endswith(WAITING) or name.startswith(("_", "<")) or name == "wrapper":
        return {}
    values = frame.f_locals
    group: Any = values.get("group")
    words, peer = f"`{name}`", None
    try:
        distributed: Any = sys.modules["torch.distributed"]
        for end, direction in (("src", "from"), ("dst", "to")):
            rank, in_group = values.get(end), values.get(f"group_{end}")
            if rank is None and in_group is not None:
                rank = distributed.get_global_rank(group or distributed.group.WORLD, in_group)
            if rank is not None and rank != distributed.get_rank():
                peer, words = rank, f"{words} {direction} rank {rank}"
        if values.get("tag"):
            words += f" with tag {values['tag']}"
        # isinstance(group, ProcessGroup) would import what the script may be importing.
        if hasattr(group, "group_desc") and group is not distributed.group.WORLD:
            ranks = ", ".join(map(str, distributed.get_process_group_ranks(group)))
            is_named = group.group_desc not in UNNAMED
            words += f" of group `{group.group_desc}`" if is_named else f" of the group of ranks {ranks}"
    except Exception:
        pass  # another version of torch
    return {"call": words[:LONGEST_DOING]} | ({"peer": peer} if "send" in name or "recv" in name else {})


def is_function_of(code: "CodeType", script: str) -> bool:
    """Whether it is the code of the script's module or of one of its functions that have names."""
    return code.co_filename == script and (code.co_name[:1] != "<" or code.co_name == "<module>")


def starting_words(frame: "FrameType") -> str:
    module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_name
    if module == "importlib._bootstrap" and name == "_find_and_load":
        return f"importing {frame.f_locals.get('name', '')}"
    for prefix, text in STARTING_MODULES.items():
        if module.startswith(prefix) and name not in STARTING_CALLS:
            return text
    return STARTING_CALLS.get(name, "")


if __name__ == "__main__":
    main()
