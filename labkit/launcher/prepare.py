"""Prepares a launch: checks all that can be checked before anything is created, and writes the run's folder.

It is the same for one host, several hosts, Slurm and a sweep. Nothing is started here.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile, is_zipfile

from labkit.arguments import Parameters
from labkit.checking import facts_of
from labkit.errors import ScriptError
from labkit.files import Json, is_a, removed_on_failure, write_json
from labkit.hardware import Hardware, check_interface, hardware, platform_name
from labkit.launch_options import LaunchOptions
from labkit.launcher import checks
from labkit.launcher.carried import carry
from labkit.launcher.stop_condition import StopCondition
from labkit.launcher.torchrun_command import (
    assignments,
    guest_node_command,
    node_torchrun_command,
    plain_arguments,
    rank_environment,
    recorded_environment,
    reproducing_command,
    script_folder,
    torchrun_command,
)
from labkit.launcher.warm.eligibility import why_new_processes
from labkit.launcher.warm.process import write_starting_files
from labkit.launcher.warm.session import VARIABLE, may_fork
from labkit.rank_files import MODULES
from labkit.record import Manifest, Nodes, RunFolder, ScriptFacts, State, SweepPoint
from labkit.session import current_folder, seconds_to_train
from labkit.stored_runs import runs_root
from labkit.text import plain
from labkit.version import __version__
from labkit.write import Script, check_flags, command_line, completed, options_of, read_back, read_file, script_names

MAIN = "__main__.py"  # what Python runs of a folder or an archive


@dataclass(frozen=True)
class Module:
    """A module that Python finds by its name and runs, as `python -m` does."""

    name: str


Launchable = Script | Module | str | os.PathLike[str]


@dataclass(frozen=True)
class Launch:
    """What is launched, after all checks: the same for one host and for several.

    `path` is the file of a user's own script, `program` how the user names it to Python: as a file, a folder or an
    archive, or with `-m` and a module. `argv` are its arguments, `parameters` the options among them, and `added` the
    options that the launch sets itself. `ranks` start on each host, described by `machine`, which is None if it is not
    known yet. `environment` is that of the ranks, without the names in `dropped`; on several `nodes` it holds only
    what the user set, as each host adds the rest. `saves`: it saves checkpoints if it can, so that it can be resumed.
    """

    script: Script
    path: Path | None
    program: list[str]
    options: LaunchOptions
    environment: dict[str, str]
    dropped: list[str]
    ranks: int
    machine: Hardware | None
    nodes: Nodes | None
    saves: bool
    argv: list[str] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    fewer_ranks: list[int] = field(default_factory=list)

    def with_arguments(self, args: Sequence[object], parameters: Parameters) -> Launch:
        """The launch of the same script with these arguments. Raises LaunchError or ScriptError."""
        argv = checks.check_arguments([*command_line(self.script, parameters), *checks.check_arguments(args)])
        if self.path is None:  # a user's own script may add options in another module
            check_flags(self.script, argv)
        values = read_back(self.script, argv)
        if self.path is None:
            checks.check_numbers(self.script, values)
        checks.check_batch(self.script, values, self.world_size)
        if self.path is None and self.machine is not None:
            checks.check_precision(values.get("precision"), self.machine, self.ranks)
        return replace(self, argv=argv, parameters=values)

    @property
    def world_size(self) -> int:
        return self.ranks if self.nodes is None else self.nodes.world_size

    @property
    def gpus(self) -> list[str]:
        """The GPUs of each host that the ranks will use, as `CUDA_VISIBLE_DEVICES` names them."""
        return [] if self.machine is None else self.machine.gpu_names(self.ranks)

    @property
    def file(self) -> str | None:
        """What Python calls the user's own file, in tracebacks for example."""
        if self.path is None or self.program[0] == "-m":
            return str(self.path) if self.path else None
        file = os.path.join(current_folder(), self.program[0])  # noqa: PTH118  # with "./" as given
        return f"{file}/{MAIN}" if self.path.name == MAIN else file

    @property
    def facts(self) -> ScriptFacts | None:
        """What the text of the script tells."""
        return facts_of(str(self.script))

    @property
    def saves_in_run(self) -> bool:
        """Whether it saves checkpoints in the run's folder: the user has not chosen another one."""
        values, options = {**self.parameters, **self.added}, options_of(self.script)
        saving = ("save_every", "deadline_seconds", "validate_every")
        saves = self.saves or any(values.get(option, "0") != "0" for option in saving)
        return saves and "checkpoint_dir" not in values and "checkpoint_dir" in options


def prepare_launch(
    script: Launchable,
    options: LaunchOptions,
    parameters: Parameters,
    *,
    nodes: Nodes | None = None,
    machine: Hardware | None = None,
    source: Path | None = None,
    saves: bool = False,
    ends_with_session: bool = False,
) -> Launch:
    """Check a launch on this host, or on several `nodes`, each a `machine` (None if it is not known yet).

    One of labkit's own scripts gets the extras that its options need; with `saves` those to save checkpoints, too, and
    with `ends_with_session` it saves and stops before a Kaggle session ends, unless it was launched with a deadline.
    `source` is the user's own file from which a Script was read. Raises LaunchError or ScriptError when the script
    could not train; of the user's own file, only Python itself knows what it imports and which names it has, so what
    seems to be missing is printed to stderr.
    """
    checks.check_torch(platform_name())
    if options.stop_if is not None:
        StopCondition(options.stop_if)
    env = checks.check_environment(options.env or {})
    if nodes is None:
        machine = hardware(env.get("CUDA_VISIBLE_DEVICES"))
        ranks = checks.check_ranks(options.nproc_per_node, options.backend, machine)
    else:
        ranks = nodes.nproc_per_node
    text, path = script_and_file(script)
    path = path or source
    if isinstance(script, Module) and parameters and path is not None and not is_a(Path.is_file, path):
        raise ScriptError(
            f"module {script.name!r} was not found in {current_folder()} or on Python's path, so its options are not "
            "known. Correct its name, or pass its arguments with args=[…]"
        )
    python_path = env.get("PYTHONPATH", "")
    if path is None:
        text.check()
        names = [name for name, value in parameters.items() if value is not None]
        text = _completed(text, names, checks.check_arguments(options.args))
        checks.check_imports(text, [script_folder(None), *filter(None, python_path.split(os.pathsep))])
        program = []
    else:
        text.check_syntax()
        program = ["-m", script.name] if isinstance(script, Module) else [_name(str(source or script))]
    environment, dropped = env, list[str]()
    if nodes is None:
        modules = {} if path else {MODULES: str(current_folder())}
        environment, dropped = rank_environment(os.environ, modules | env)
    launch = Launch(text, path, program, options, environment, dropped, ranks, machine, nodes, saves)
    launch = launch.with_arguments(options.args, parameters)
    for doubt in _doubts(text, path, python_path) if path else ():
        print(plain(doubt), file=sys.stderr, flush=True)
    fewer = list[int]()
    if nodes is None:
        check_interface({**os.environ, **env}.get("GLOO_SOCKET_IFNAME", ""))
        fewer = checks.fewer_ranks(text, launch.parameters, ranks, options)
    added: dict[str, str] = {}
    if path is None and ends_with_session:
        RunFolder.check_root(runs_root(options.runs_dir))  # nothing is printed about a run that cannot be made
        added = _session_deadline(launch)
    if path is None:
        text = _with_extras(text, [*added, *(["checkpoint_dir"] if saves else [])])
    return replace(launch, script=text, added=added, fewer_ranks=fewer)


def script_and_file(script: Launchable) -> tuple[Script, Path | None]:
    """The script, and its file if it is the user's own."""
    if isinstance(script, Script):
        return script, None
    if isinstance(script, Module):
        path = _file_of(script.name)
        has_text = is_a(Path.is_file, path)
        return Script.read(read_file(path), path) if has_text else Script.parse("", name=path.stem), path
    if not isinstance(script, str | os.PathLike) or not str(script).strip():
        raise ScriptError(f"launch takes a Script, the name of one, or a path; got {script!r}")
    if isinstance(script, str) and script in script_names():
        return Script.load(script), None
    path = Path(script).absolute()
    if str(path) != str(path).encode("utf-8", "replace").decode():
        raise ScriptError(f"the path {ascii(str(path))} is not UTF-8 and cannot be recorded; rename the script")
    if is_a(Path.is_file, path / MAIN):
        return Script.read(read_file(path / MAIN), path / MAIN, name=path.name), path / MAIN
    if is_a(Path.is_file, path) and is_zipfile(path):
        with suppress(KeyError), ZipFile(path) as archive:
            return Script.read(archive.read(MAIN), path / MAIN, name=path.stem), path / MAIN
    return Script.load(script), path


def _name(file: str) -> str:
    return f"./{file}" if file.startswith("-") else file  # torchrun would take it for an option


def _file_of(module: str) -> Path:
    """Where Python finds a module, without importing any; where this folder would have it if it is not found here."""
    parts, folders = module.split("."), [str(current_folder()), *sys.path]
    expected = Path(current_folder(), *parts).with_suffix(".py")
    file = None
    for name in [*parts, MAIN.removesuffix(".py")]:
        if (spec := PathFinder.find_spec(name, folders)) is None:
            return Path(file) if file and f"{name}.py" == MAIN else expected
        file, folders = spec.origin, list(spec.submodule_search_locations or ())
    return Path(file) if file else expected


def _doubts(script: Script, path: Path, python_path: str) -> Iterator[str]:
    try:
        script.check()
    except ScriptError as error:
        yield str(error)
    yield from checks.imports_in_doubt(script, script_folder(path), python_path)


def _completed(script: Script, names: Sequence[str], args: Sequence[str] = ()) -> Script:
    whole = completed(script, names, args)
    if whole is not script:
        whole.check()
    return whole


def _with_extras(script: Script, options: Sequence[str]) -> Script:
    """The script with the extras that declare these options, which the launch sets itself, unless its own cells
    conflict with the extras'."""
    try:
        return _completed(script, options)
    except ScriptError:
        return script


def _session_deadline(launch: Launch) -> dict[str, str]:
    """`deadline_seconds`, if this process runs in a session with a time limit. Prints what the run will do."""
    seconds = seconds_to_train()
    if seconds is None or "deadline_seconds" in launch.parameters:
        return {}
    if "deadline_seconds" not in options_of(_with_extras(launch.script, ["deadline_seconds"])):
        return {}
    print(f"Kaggle sessions are limited: this run saves and stops after {seconds:.0f} s (deadline_seconds=0: never)")
    return {"deadline_seconds": f"{seconds:.0f}"}


def create_run(
    launch: Launch,
    *,
    address: str = "HEAD",
    port: int | str = "PORT",
    prediction: Mapping[str, Json] | None = None,
    sweep: SweepPoint | None = None,
) -> RunFolder:
    """Write the folder of a run, with nothing started. Raises RunFolderError.

    `address` and `port` are the rendezvous of several nodes, placeholders if only the job will know them. `prediction`
    is the plan's.
    """
    folder = RunFolder.create(runs_root(launch.options.runs_dir), str(launch.options.name or launch.script.name))
    with removed_on_failure(folder.path):
        folder.script.write_bytes(launch.script.encoded())
        write_starting_files(folder)
        folder.ranks.mkdir()
        if launch.nodes is not None:
            folder.nodes.mkdir()
            carry(folder, launch.script, launch.path, launch.program, launch.argv)
        manifest = _manifest(launch, folder, address, port, sweep)
        lines = _lines_without_labkit(launch, manifest.program, address, port)
        folder.command.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        write_json(folder.manifest, manifest.to_json())
        State("starting", time.time()).write(folder)
        if prediction:
            write_json(folder.plan, prediction)
    return folder


def _manifest(launch: Launch, folder: RunFolder, address: str, port: int | str, sweep: SweepPoint | None) -> Manifest:
    script, machine, nodes = launch.script, launch.machine, launch.nodes
    program = launch.program or [str(folder.script)]
    args = [*launch.argv, *command_line(script, launch.added)]
    args += ["--checkpoint-dir", str(folder.checkpoints)] if launch.saves_in_run else []
    if nodes is None:
        torchrun = torchrun_command(folder, launch.ranks, program, args)
    else:
        torchrun = guest_node_command(folder, nodes, 0, address, port, program, args)
    on_gpus = machine is not None and launch.ranks <= len(machine.gpus)
    return Manifest(
        name=script.name,
        id=folder.id,
        folder=str(folder.path),
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        world_size=launch.world_size,
        script=Manifest.Script(script.sha256, launch.file),
        program=(*program,),
        facts=launch.facts,
        cells={cell.title: cell.origin for cell in script.parts if cell.origin},
        parameters=launch.parameters,
        args=(*args,),
        cwd=str(current_folder()),
        versions={"python": sys.version.split()[0], "torch": version("torch"), "labkit": __version__},
        git=_git_commit(),
        torchrun=(*torchrun,),
        backend=None if machine is None else "nccl" if on_gpus else "gloo",
        devices=() if machine is None else (*(gpu.name for gpu in machine.gpus),) or ("cpu",),
        platform=platform_name() if machine is None else machine.platform,
        env=recorded_environment(launch.environment),
        env_dropped=(*launch.dropped,),
        new_processes=_why_new_processes(launch) if nodes is None else None,
        retries=launch.options.retries,
        fewer_ranks=(*launch.fewer_ranks,),
        watchdog=launch.options.watchdog,
        stop_if=launch.options.stop_if,
        gpus=(*launch.gpus,),
        nodes=nodes,
        sweep=sweep,
    )


def _lines_without_labkit(launch: Launch, program: Sequence[str], address: str, port: int | str) -> list[str]:
    """The command that runs the same training without labkit on each host, with the variables that the launch adds."""
    environment, nodes = launch.environment, launch.nodes
    if nodes is None:
        added = {name: value for name, value in environment.items() if os.environ.get(name) != value}
        return [reproducing_command(program, launch.ranks, launch.argv, added)]
    names, rest = assignments(environment), plain_arguments(program, launch.argv)
    commands = [node_torchrun_command(["torchrun"], nodes, node, address, port, *rest) for node in range(nodes.count)]
    return [" ".join([*names, shlex.join(command)]) for command in commands]


def _why_new_processes(launch: Launch) -> str | None:
    """Why the ranks are new processes, not forks of one that has imported torch; None if they may be forks."""
    if not may_fork(launch.environment):
        return f"{VARIABLE} is 0, or this system does not support it"
    folder = launch.path.parent if launch.path else current_folder()
    return why_new_processes(launch.program or ["script.py"], str(launch.script), folder, launch.environment)


def _git_commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
