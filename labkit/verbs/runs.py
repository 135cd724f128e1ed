"""Lists, follows, stops, asks, compares, exports and deletes runs from a terminal."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import labkit
from labkit.errors import LabError
from labkit.export import FORMATS
from labkit.place import belongs_to_another_user
from labkit.record import StateName
from labkit.stored_runs import runs_root
from labkit.text import plain
from labkit.verbs.documents import add_json, show
from labkit.verbs.launch import follow
from labkit.view import RunList, report_data

if TYPE_CHECKING:
    from labkit.run import Run

FAILS, UNTOLD = 5, 6  # exit codes of `compare --fail-if`
GATES = """examples:
  labkit compare before after --fail-if "step_time > 5%" --fail-if "val_loss > 0.01"
  labkit compare new-1 new-2 new-3 --base old-1 old-2 old-3 --fail-if "peak_memory > 2%"

step_time is the median over recorded steps and ranks, peak_memory that of the rank with the most; all other names are
metrics that the script reports. docs/how_to/check_in_ci.md says what is noise.
"""
SORT = "a metric (the best first), a parameter, duration, ranks, or started (the newest first)"


def add_run_verbs(verb: Callable[..., argparse.ArgumentParser]) -> None:
    listing = verb("runs", _runs, "list runs: states, the options they differ in, losses")
    listing.add_argument("which", nargs="*", metavar="RUN", help="only these: ids, parts of them, paths, or latest")
    listing.add_argument("--last", type=int, metavar="N", help="only the newest N, or with --sort the first N")
    add_json(listing)
    listing.add_argument("--clean", action="store_true", help="delete the folders of launches that were killed")
    prune = verb("prune", _prune, "delete the folders of ended runs, with logs and checkpoints")
    prune.add_argument(
        "--keep",
        type=int,
        default=0,
        metavar="N",
        help="keep the first N: the newest, or the best by --sort (default: 0)",
    )
    prune.add_argument("--yes", action="store_true", help="delete them; without this option the runs are only listed")
    for sub in (listing, prune):
        sub.add_argument("--script", help="only runs of the script of this name")
        sub.add_argument("--state", choices=[*get_args(StateName), "wrong"], help="only runs in this state")
        sub.add_argument("--tag", help="only runs with this tag")
        sub.add_argument("--sort", metavar="NAME", help=SORT)
    remove = verb("rm", _rm, "delete the folders of these runs, with logs and checkpoints")
    remove.add_argument("which", nargs="+", help="ids, their ends, or paths")
    for name, run, help, default in (
        ("attach", _attach, "follow a run until it ends; Ctrl-C leaves it running", "latest"),
        ("stop", _stop, "stop a run on every rank; without an id, the newest active one", None),
        ("stacks", _stacks, "show where every rank of a run is now, for example if it is stuck", "latest"),
        ("findings", _findings, "print what is wrong with a training that runs or succeeded", "latest"),
        (
            "pause",
            _pause,
            "pause a run, all ranks at the end of the same step; without an id, the newest active one",
            None,
        ),
        ("resume", _resume, "resume a paused run; without an id, the newest one", None),
        ("timeline", _timeline, "print the seconds of each phase of a run launched with --profile", "latest"),
        ("report", _report, "write report.html into a run's folder", "latest"),
    ):
        which = "an id, part of one, a path, or latest"
        sub = verb(name, run, help)
        sub.add_argument("which", nargs="?", default=default, help=which)
        if name in ("stacks", "findings", "report"):
            add_json(sub)
    logs = verb("logs", _logs, "print the logs of a run's ranks, at most the last 1 MiB of each")
    logs.add_argument("which", nargs="?", default="latest", help="an id, part of one, a path, or latest")
    logs.add_argument("--rank", type=int, metavar="N", help="only this rank (default: every rank)")
    logs.add_argument(
        "--stdout",
        dest="stream",
        action="store_const",
        const="stdout",
        help="only stdout (default: both, stdout first)",
    )
    logs.add_argument("--stderr", dest="stream", action="store_const", const="stderr", help="only stderr")
    ask = verb("ask", _ask, "evaluate an expression on every rank of a run, at the same step")
    ask.add_argument("which", help="an id, part of one, a path, or latest")
    ask.add_argument("expression", help='for example "loss.item(), x.shape"')
    add_json(ask)
    profile = verb("profile", _profile, "record steps of a running training, and print the seconds of each phase")
    profile.add_argument("which", nargs="?", default="latest", help="an id, part of one, a path, or latest")
    profile.add_argument("--steps", type=int, default=3, metavar="N", help="how many (default: 3)")
    export = verb("export", _export, "write a run's records for another tool and print where they are")
    export.add_argument("which", metavar="RUN", help="an id, part of one, a path, or latest")
    export.add_argument("to", metavar="FORMAT", help=", ".join(FORMATS))
    export.add_argument("path", metavar="PATH", nargs="?", help="a file, or a folder for tensorboard and wandb")
    export.add_argument("--project", default="labkit", help="of trackio and wandb (default: labkit)")
    compare = verb(
        "compare",
        _compare,
        "compare runs side by side; speed-ups are relative to the first; "
        f"exits with {FAILS} if a --fail-if holds, {UNTOLD} if it cannot be told",
        epilog=GATES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compare.add_argument("which", nargs="*", help="ids or paths, oldest first")
    compare.add_argument("--last", type=int, default=0, metavar="N", help="compare the newest N runs instead")
    compare.add_argument("--sort", metavar="NAME", help=SORT)
    base = "compare with these, which are repeats of each other, as the RUNs are (default: the first run)"
    compare.add_argument("--base", nargs="+", default=[], metavar="RUN", help=base)
    condition = "fail if the runs differ from the base so: NAME > LIMIT, NAME < LIMIT, with %% of the base's value"
    compare.add_argument("--fail-if", action="append", default=[], metavar="CONDITION", help=condition)
    add_json(compare)


def _findings(arguments: argparse.Namespace, rest: list[str]) -> int:
    run = _run(arguments)
    found = run.findings()
    show(arguments, plain(repr(found)), lambda: {**found.to_dict(), "run": run.id})
    return 1 if found.certain else 0


def _chosen(arguments: argparse.Namespace) -> RunList:
    options = {name: getattr(arguments, name) for name in ("script", "state", "tag", "sort", "runs_dir")}
    return labkit.runs(**options)


def _run(arguments: argparse.Namespace) -> Run:
    return labkit.attach(arguments.which, runs_dir=arguments.runs_dir)


def _prune(arguments: argparse.Namespace, rest: list[str]) -> None:
    if arguments.keep < 0:
        raise LabError(f"--keep must be 0 or more, got {arguments.keep}")
    runs = _chosen(arguments)
    deleted = runs.rm(keep=arguments.keep) if arguments.yes else [run.id for run in runs.but(arguments.keep)]
    print("\n".join(map(plain, deleted)) or "nothing to delete")
    if deleted:
        count = f"{len(deleted)} run{'s' * (len(deleted) > 1)}"
        print(f"deleted {count}" if arguments.yes else f"add --yes to delete {count}")


def _rm(arguments: argparse.Namespace, rest: list[str]) -> None:
    for run in [_named_exactly(which, arguments.runs_dir) for which in arguments.which]:
        run.rm()
        print(f"deleted {plain(run.id)}")


def _named_exactly(which: str, runs_dir: str | None) -> Run:
    """The run of this path or id, or with this end of its id: any other part would be deleted by chance."""
    run = labkit.attach(which, runs_dir=runs_dir)
    is_path = Path(which).exists() and run.path.samefile(which)
    if not (is_path or run.id.endswith(which)):
        end = run.id.partition("-")[2]
        raise LabError(f"rm takes an id, its end, such as {end}, or a path, because it cannot be undone; got {which!r}")
    return run


def _runs(arguments: argparse.Namespace, rest: list[str]) -> None:
    if arguments.clean:
        for folder in _chosen(arguments).unfinished:
            shutil.rmtree(folder)
            print(f"deleted {plain(str(folder))}")
    runs = _listed(arguments)
    if arguments.json and not (root := runs_root(arguments.runs_dir)).is_dir():
        print(plain(f"labkit: there is no folder {root}"), file=sys.stderr)
    show(arguments, runs, runs.facts)


def _listed(arguments: argparse.Namespace) -> RunList:
    if arguments.last is not None and arguments.last < 1:
        raise LabError(f"--last must be 1 or more, got {arguments.last}")
    filters = [f"--{name}" for name in ("script", "state", "tag") if getattr(arguments, name) is not None]
    if not arguments.which:
        runs = _chosen(arguments)
    elif filters:
        raise LabError(f"{filters[0]} selects among all runs; give it, or ids, but not both")
    else:
        runs = RunList(labkit.attach(which, runs_dir=arguments.runs_dir) for which in arguments.which)
        runs = runs if arguments.sort is None else runs.sorted(arguments.sort)
    return runs if arguments.last is None else runs[: arguments.last]


def _attach(arguments: argparse.Namespace, rest: list[str]) -> int:
    run = _run(arguments)
    if not run.status().is_final and not sys.stdout.isatty():  # the live view shows everything
        print(run, flush=True)
    return follow(run)


def _stop(arguments: argparse.Namespace, rest: list[str]) -> None:
    if arguments.which is not None:
        _run(arguments).stop()
        return
    active = _active(arguments)
    if not active:
        print("no run is active")
    for run in active[:1]:
        run.stop()


def _active(arguments: argparse.Namespace) -> list[Run]:
    """This user's runs that have not ended, the newest first."""
    active = [run for run in labkit.runs(runs_dir=arguments.runs_dir) if not run.status().is_final]
    return [run for run in active if not belongs_to_another_user(run.path)]


def _stacks(arguments: argparse.Namespace, rest: list[str]) -> None:
    run = _run(arguments)
    stacks = run.stacks()
    show(arguments, stacks, lambda: {**stacks.to_dict(), "run": run.id})


def _logs(arguments: argparse.Namespace, rest: list[str]) -> None:
    run = _run(arguments)
    print(run.logs(rank=arguments.rank, stream=arguments.stream), end="")


def _ask(arguments: argparse.Namespace, rest: list[str]) -> None:
    run = _run(arguments)
    answer = run.ask(arguments.expression)
    rows = answer.to_dict("records")
    answers = [{"rank": row.pop("rank"), "step": row.pop("step"), "values": row} for row in rows]
    asked = {"schema": "labkit.ask/1", "run": run.id, "expression": arguments.expression}
    show(arguments, plain(answer.to_string(index=False)), lambda: asked | {"answers": answers})


def _pause(arguments: argparse.Namespace, rest: list[str]) -> None:
    run = _named_or_newest(arguments, paused=False)
    print(f"{plain(run.id)}: paused at the end of step {run.pause()}")


def _resume(arguments: argparse.Namespace, rest: list[str]) -> None:
    run = _named_or_newest(arguments, paused=True)
    run.resume()
    print(f"{plain(run.id)}: resumed")


def _named_or_newest(arguments: argparse.Namespace, *, paused: bool) -> Run:
    """The run that is named, or else the newest active one, or paused one. Raises LabError if there is none."""
    if arguments.which is not None:
        return _run(arguments)
    active = _active(arguments)
    if not active:
        raise LabError("no run is active")
    for run in active:
        if run.status().is_paused or not paused:
            return run
    raise LabError(plain(f"no run is paused; active: {', '.join(run.id for run in active)}"))


def _timeline(arguments: argparse.Namespace, rest: list[str]) -> None:
    print(_run(arguments).timeline())


def _profile(arguments: argparse.Namespace, rest: list[str]) -> None:
    print(_run(arguments).profile(arguments.steps))


def _report(arguments: argparse.Namespace, rest: list[str]) -> None:
    run = _run(arguments)
    path = run.report()
    show(arguments, plain(str(path)), lambda: report_data(run) | {"path": str(path)})


def _export(arguments: argparse.Namespace, rest: list[str]) -> None:
    run = _run(arguments)
    print(plain(str(run.export(arguments.to, arguments.path, project=arguments.project))))


def _compare(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.last:
        chosen = list(reversed(labkit.runs(runs_dir=arguments.runs_dir)))[-arguments.last :]
    else:
        chosen = [labkit.attach(which, runs_dir=arguments.runs_dir) for which in arguments.which]
    base = [labkit.attach(which, runs_dir=arguments.runs_dir) for which in arguments.base]
    if arguments.fail_if and not base and len(chosen) != 2:
        raise LabError(f"--fail-if compares two runs, or RUN … with --base RUN …; got {len(chosen)} and no --base")
    comparison = labkit.compare(chosen, base=base, sort=arguments.sort)
    gate = comparison.gate(*arguments.fail_if) if arguments.fail_if else None
    text = comparison if gate is None else f"{comparison}\n{gate}"
    decided = {"gate": gate, "passed": gate and gate.passed}
    show(arguments, text, lambda: comparison.to_dict() | decided)
    return 0 if gate is None else {True: 0, False: FAILS, None: UNTOLD}[gate.passed]
