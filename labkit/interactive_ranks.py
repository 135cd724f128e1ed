"""Interactive ranks: a run whose ranks wait for cells, and execute each of them at once."""

from __future__ import annotations

import ast
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from typing import Any

from labkit.arguments import Seconds, checked
from labkit.cell_execution import Execution, failed
from labkit.cell_output import CellOutput
from labkit.cluster import state_of_run
from labkit.errors import LabError, RunFolderError, ScriptError, did_you_mean
from labkit.frontend import is_headless, notebook_shell
from labkit.install import pip_install
from labkit.launch_options import LaunchOptions
from labkit.launching import start_run
from labkit.rank_files import CELLS
from labkit.record import RunFolder, State
from labkit.run import Run
from labkit.stored_runs import find_run, list_runs
from labkit.text import plain
from labkit.worker import CannotBeSentError, CellFolder, values_from, values_to
from labkit.write import Cell, Script, as_cell, command_line, is_python

SCRIPT = Path(__file__).with_name("worker") / "ranks_script.py"
UNWATCHED_SECONDS = 600.0  # after which ranks end, if no notebook has looked at them
LOOK_SECONDS = 20.0
COLLECTIVE_SECONDS = 60.0
POLL_SECONDS = 0.02
LONGEST_LITERAL = 80  # characters
FUTURE = re.compile(r"^from __future__ import [\w, ]+\n", re.MULTILINE)
NEW_GROUP = "the ranks have joined a new process group; make again what used the old one: meshes, DDP and FSDP models"
_looked_at: dict[Path, RunFolder] = {}  # runs at which a thread of this process looks, the newest last


@checked()
def ranks(
    nproc_per_node: int | str = "auto",
    *,
    run: str | os.PathLike[str] | None = None,
    timeout: Seconds = COLLECTIVE_SECONDS,
    keep: bool = False,
    **options: Any,
) -> Ranks:
    """Start ranks that wait for cells: `%%ranks` executes a cell on all of them, at once. They have `torch`, `dist`,
    `rank`, `world_size`, `device` and a process group; what a cell defines stays.

    It is an ordinary run of torchrun's, with logs, causes and `stop()`. `run` opens one that is running again, for
    example after the kernel was restarted. A collective in which a rank waits for more than `timeout` seconds raises
    an error on that rank. Ranks end when no notebook has been there for ten minutes, unless `keep`, and with this
    process where nobody works: under papermill, in a program. Other `options` are those of `labkit.launch`, such as
    `backend`, `env` and `runs_dir`.

    Raises LaunchError before anything is started, and RankFailedError if the ranks do not come up.
    """
    runs_dir = options.get("runs_dir")
    if run is not None:
        found = opened(None if run == "latest" else run, runs_dir=runs_dir)
        if not isinstance(found, Ranks):
            raise LabError(f"the ranks of {found.id} do not wait for cells; those of labkit.ranks(…) do")
        return _shown(found)
    if find_spec("IPython") is None:
        raise LabError(f"ranks execute cells with IPython, which is not installed: {pip_install('ipython')}")
    known, rest = LaunchOptions.split({"name": "ranks", **options, "nproc_per_node": nproc_per_node})
    if rest:
        known_names = ["timeout", "keep", "run", *LaunchOptions.names()]
        raise LabError(f"ranks has no option {next(iter(rest))!r}{did_you_mean(next(iter(rest)), known_names)}")
    if known.retries:
        raise LabError("ranks are not restarted, because what cells have defined would be lost; leave out retries=")
    # a rank that waits for NCCL raises an error instead of ending the process
    env = {"TORCH_NCCL_BLOCKING_WAIT": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    env |= {**(known.env or {}), CELLS: "inf" if keep else str(UNWATCHED_SECONDS)}
    fields = {**vars(known), "args": [f"{timeout:g}"], "env": env, "witness": False}
    script = Script.parse(SCRIPT.read_text(encoding="utf-8"), name="ranks")
    started = Ranks(start_run(script, LaunchOptions(**fields), {}, tied=is_headless()).folder)
    started.folder.cells.mkdir(0o700, exist_ok=True)
    return _shown(started)


def _shown(started: Ranks) -> Ranks:
    started.await_ready()
    if (shell := notebook_shell()) is not None:
        shell.extension_manager.load_extension("labkit")  # the magic
    return started


def own() -> Ranks | None:
    """The ranks that this process has started or opened last, even if they have ended."""
    return Ranks([*_looked_at.values()][-1]) if _looked_at else None


def opened(which: str | os.PathLike[str] | None = None, *, runs_dir: str | os.PathLike[str] | None = None) -> Run:
    """The run of this id, part of one, or path, as Ranks if its ranks wait for cells. By default the newest active run
    whose ranks do, or else the newest run. Raises RunFolderError if there is none."""
    if which is None and not list_runs(runs_dir):
        raise RunFolderError("no ranks wait for cells yet; labkit.ranks(2) starts some")
    folder = find_run("latest" if which is None else which, runs_dir)
    if which is None:
        waiting = (run for run in reversed(list_runs(runs_dir)) if run.cells.is_dir())
        folder = next((run for run in waiting if not state_of_run(run).is_final), folder)
    return Ranks(folder) if folder.cells.is_dir() else Run(folder)


class Ranks(Run):
    """A run whose ranks wait for cells. It is a Run in everything else: `logs`, `stacks`, `status`, `stop`."""

    def await_ready(self) -> None:
        """Wait until every rank waits for cells. Raises RankFailedError if one fails before."""
        self.folder.check_own("send it cells")
        _keep_looking(self.folder)
        waiting = {*State.current_ranks(self.folder)}
        while waiting := {rank for rank in waiting if not (self.folder.cells / f"ready-{rank}").exists()}:
            self._check_running()
            time.sleep(POLL_SECONDS)
        self._check_running()

    @checked()
    def exec(self, cell: str, *, ranks: Sequence[int] | None = None, timeout: Seconds | None = None) -> None:
        """Execute a cell on every rank, or on these `ranks` only, and show below it what each of them printed and
        displayed; ranks with the same output are shown once. Whatever IPython understands is a cell.

        A cell runs as long as it takes, or `timeout` seconds; an interrupt ends it on all ranks, and the ranks live on.
        Raises LabError if a rank raised an error, after the output, and RankFailedError if a rank's process ended.
        """
        self._carried_out(
            "cell", ranks, timeout=timeout, output=CellOutput(self.folder.latest), text=cell, count=_number_of_cell()
        )

    @checked()
    def pull(self, expression: str, *, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """The value of an expression on each rank: tensors (on the CPU), arrays, numbers, text, and tuples, lists and
        dictionaries of these. Sharded tensors are gathered, unless only some `ranks` are asked: they send their shards.

        Raises LabError if the value is anything else, or a rank raised an error.
        """
        text = expression.strip()
        if not is_python(f"({text}\n)"):
            raise LabError(f"pull takes an expression such as 'loss.item()', got {expression!r}")
        cell = self._carried_out("pull", ranks, text=text)
        return {rank: values_from(cell.values_of(rank), remove=True)[text] for rank in self._targets(ranks)}

    @checked()
    def push(self, *, ranks: Sequence[int] | None = None, **values: Any) -> None:
        """Set variables on every rank, or on these `ranks` only: `push(batch=x)`. Values are what `pull` returns, and
        tensors stay on the CPU. Raises LabError for anything else."""
        try:
            content = values_to(values)
        except CannotBeSentError as error:
            raise LabError(f"{error}; define it in a cell: %%ranks") from None
        texts = {name: _literal(value) for name, value in values.items()}
        cell = self._carried_out("push", ranks, files={"values.pt": content}, texts=texts)
        cell.values.unlink(missing_ok=True)

    @checked()
    def load(self, *parts: Any, **parameters: Any) -> None:
        """Define on every rank what a script defines, without running its `main`, or what the notebook cell of a
        function or class defines: `load(Script.load("fsdp"), steps=5)`, `load(Model, sharded)`.

        A script brings its options with these `parameters` as `args`, so that you can go through a training by hand.
        Raises ScriptError for anything else, and for a script that also runs code outside its `main`.
        """
        cells, argv = list[str](), list[str]()
        for part in (Script.load(each) if isinstance(each, str) else each for each in parts):
            if isinstance(part, Script):
                cells += [_without_main(cell) for cell in (Cell(part.name, part.head), *part.parts)]
                cells += ["args = parse_args()"] * ("def parse_args" in str(part))
                argv += command_line(part, parameters)
            else:
                cells.append(as_cell(getattr(part, "__name__", "cell"), part).text)
        self._carried_out("load", None, cells=cells, argv=argv)

    def executed(self) -> Script:
        """What the ranks have executed as a script that bare torchrun runs: the cells in which no rank failed. A cell
        that only some ranks executed is left to them. What is not Python is a comment. Of what was pushed, short
        numbers and texts are there, and anything else is to be assigned."""
        head, rest = SCRIPT.read_text(encoding="utf-8").split("# %% cells\n")
        texts = [head.rstrip()]
        for number, cell in enumerate(self._done(), 1):
            texts.append(f"# %% cell {number}\n{_as_code(cell.request())}")
        texts.append(rest[rest.index("# %% end\n") :])
        text = "\n\n\n".join(texts)
        if futures := "".join(dict.fromkeys(FUTURE.findall(text))):  # which Python takes only at the top
            text = FUTURE.sub("", text).replace("# %% ranks\n", f"# %% ranks\n{futures}", 1)
        return Script.parse(text, name="ranks")

    def _done(self) -> Iterator[CellFolder]:
        """The cells that succeeded on all their ranks, in order."""
        numbers = sorted(int(path.name) for path in self.folder.cells.iterdir() if path.name.isdecimal())
        for cell in (CellFolder(self.folder.cells / str(number)) for number in numbers):
            request = cell.request()
            answers = [cell.read_answer(rank) for rank in self._targets(request.get("ranks"))]
            if request.get("kind") in ("cell", "load", "push") and all(
                answer and not answer.error for answer in answers
            ):
                yield cell

    def __repr__(self) -> str:
        state = self.status()
        if state.is_final:
            return f"{plain(self.id)}: {state}"
        count, manifest = len(State.current_ranks(self.folder)), self.folder.read_manifest()
        place = f"{', '.join(dict.fromkeys(manifest.devices))} over {manifest.backend}"
        ranks = f"{count} rank{'s' * (count > 1)} on {place} wait for cells ({plain(self.id)})"
        return f"{ranks}\n%%ranks executes a cell on all of them, %%ranks --ranks 1 on one"

    def _ipython_display_(self) -> None:
        print(repr(self))

    # How a cell is executed

    def _carried_out(
        self,
        kind: str,
        ranks: Sequence[int] | None,
        *,
        files: Mapping[str, bytes] | None = None,
        timeout: float | None = None,
        output: CellOutput | None = None,
        **content: Any,
    ) -> CellFolder:
        """Have the ranks execute a cell, and return it once they have. Raises LabError if one could not."""
        targets = self._targets(ranks)
        self._check_running()
        request = {"kind": kind, "ranks": None if ranks is None else targets, **content}
        try:
            cell = CellFolder.post(self.folder.cells, request, files)
        except OSError as error:
            raise LabError(plain(f"the cell could not be written: {error}")) from None
        execution = Execution(cell, targets, self._check_running, output)
        answers = execution.wait(timeout)
        failures = [f"the cell was interrupted after {timeout:g} s"] if execution.is_out_of_time else []
        failures += failed(answers)
        if kind != "group" and (execution.group or any(answer.broken for answer in answers.values())):
            try:
                self._join_new_group(execution.group)
                failures.append(NEW_GROUP)
            except LabError as error:
                failures.append(f"the ranks could not join a new process group: {error}")
        if failures:
            raise LabError(plain("; ".join(failures)))
        if kind == "cell" and not all(answer.grouped for answer in answers.values()):
            print("these ranks have no process group now; join_ranks() in a cell makes one")
        return cell

    def _join_new_group(self, posted: CellFolder | None) -> None:
        """Have all ranks join a new process group, once: a second request would close the first one's connections."""
        if posted is None:
            self._carried_out("group", None)
        elif failures := failed(Execution(posted, self._targets(None), self._check_running).wait()):
            raise LabError("; ".join(failures))

    def _targets(self, ranks: Sequence[int] | None) -> list[int]:
        world = State.current_ranks(self.folder)
        if ranks is not None and (not ranks or not {*ranks} <= {*world}):
            raise LabError(f"ranks must be among {', '.join(map(str, world))}; got {ranks!r}")
        return sorted(world if ranks is None else {*ranks})

    def _check_running(self) -> None:
        """Raise RankFailedError if the run has failed, LabError if it has ended otherwise."""
        state = self.status()
        if state.state in ("failed", "lost"):
            raise self._failure(state)
        if state.is_final:
            raise LabError(plain(f"these ranks have ended ({state}); start others with labkit.ranks(…)"))


def _number_of_cell() -> int | None:
    """The number of the notebook's cell that is executed; its `execution_count` is already that of the next one in some
    versions of IPython."""
    history = getattr(notebook_shell(), "history_manager", None)
    return len(history.input_hist_raw) - 1 if history is not None else None


def _keep_looking(folder: RunFolder) -> None:
    """Touch a file while this process lives, so that the ranks know that a notebook is there."""

    def look() -> None:
        touched = -math.inf
        while not state_of_run(folder).is_final:
            if time.monotonic() - touched >= LOOK_SECONDS:
                touched = time.monotonic()
                with suppress(OSError):
                    (folder.cells / "looked").touch(0o600)
            time.sleep(1.0)

    is_new = _looked_at.pop(folder.path, None) is None
    _looked_at[folder.path] = folder
    if is_new:
        threading.Thread(target=look, name="labkit ranks", daemon=True).start()


def _without_main(cell: Cell) -> str:
    """A cell of a script without what only runs if it is the program: `if __name__ == "__main__":` at its top. Raises
    ScriptError if it runs anything else."""
    try:
        cell.check_only_defines()
    except ScriptError as error:
        what = str(error).split("\n")[0]
        raise ScriptError(f'{what}; put it under `if __name__ == "__main__":`, so that load only defines') from None
    tree = ast.parse(cell.text)
    runs = [each for each in tree.body if isinstance(each, ast.If) and "__name__" in ast.unparse(each.test)]
    lines = cell.text.splitlines()
    for each in reversed(runs):
        del lines[each.lineno - 1 : each.end_lineno]
    return "\n".join(lines)


def _literal(value: Any) -> str | None:
    """A short number, text, or list of these as Python; None for anything else."""
    text = repr(value)
    try:
        is_same = len(text) <= LONGEST_LITERAL and type(ast.literal_eval(text)) is type(value)
    except (SyntaxError, ValueError):
        is_same = False
    return text if is_same else None


def _as_code(request: Mapping[str, Any]) -> str:
    """A cell's code, for a script."""
    if request["kind"] == "push":
        lost = [name for name, text in request["texts"].items() if text is None]
        lines = [f"{name} = {text}  # pushed from the notebook" for name, text in request["texts"].items()]
        missing = f'raise SystemExit("assign {", ".join(lost)} above, which the notebook had pushed")'
        return "\n".join([*lines, *([missing] if lost else [])])
    if request["kind"] == "load":
        return "\n".join([f"sys.argv[1:] = {request['argv']!r}", *request["cells"]])
    text: str = request["text"].strip("\n")
    try:
        compile(text, "cell", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # a magic, or `await` outside a function; `# %%time` would be a title
        return "\n".join(f"#   {line}" for line in text.split("\n"))
    if request["ranks"] is None or not ast.parse(text).body:
        return text
    block = f"if rank in {request['ranks']}:\n{indent(text, '    ')}"
    tree, indented = ast.parse(text), ast.parse(block).body[0]
    is_same = isinstance(indented, ast.If) and [*map(ast.dump, indented.body)] == [*map(ast.dump, tree.body)]
    # a text over several lines would have been indented, too
    return block if is_same else f"if rank in {request['ranks']}:\n{indent(ast.unparse(tree), '    ')}"
