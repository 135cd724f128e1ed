"""The command line: the functions of the notebook as verbs."""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args

import labkit
from labkit.errors import LabError
from labkit.export import FORMATS
from labkit.record.state import StateName
from labkit.record.text import plain
from labkit.verbs.check import add_check_verb
from labkit.verbs.kaggle import add_kaggle_verbs
from labkit.verbs.slurm import add_slurm_verbs, follow
from labkit.verbs.sweep import add_sweep_verb
from labkit.write import check_flags, completed, extra_options, options_of, read_back, script_names
from labkit.write.call_options import whole_number
from labkit.write.launch_options import LaunchOptions

if TYPE_CHECKING:
    from labkit.view.run_list import RunList
    from labkit.write.options import Option

__all__ = ["main"]

AddVerb = Callable[..., argparse.ArgumentParser]

EXAMPLES = """examples:
  labkit doctor
  labkit launch ddp --nproc-per-node 2 --steps 100      one of labkit's own scripts, with its options
  labkit write fsdp checkpoints --task digits > mine.py  the script as a file
  labkit launch train.py --nproc-per-node 2 -- 50 --lr 1e-3
  labkit check train.py                                  errors that hang, corrupt or slow down the training
  labkit plan fsdp --nproc-per-node 8 --device A100-40 -- --global-batch-size 512
  labkit sweep ddp --lr 1e-3,3e-4 --seed 0,1 --steps 200
  labkit runs
  labkit stop latest
"""

SORT = "a metric (the best first), a parameter, duration, ranks, or started (the newest first)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 success, 1 the training failed or does not fit, a check has findings, or the doctor
    found that a launch would fail, 2 refused before anything started, 129 the terminal was closed, 130 interrupted, 141
    the reader of the output has exited."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.verb not in ("launch", "plan", "slurm", "sweep"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if "--" in rest:  # the first one is labkit's
        rest.remove("--")
    try:
        return int(arguments.run(arguments, rest) or 0)
    except labkit.RankFailedError as error:
        print(plain(str(error)), file=sys.stderr)
        return 1
    except LabError as error:
        print(f"labkit: {plain(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has exited
        _discard_output()
        return 141
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        _discard_output()  # the terminal was closed
        return 129


def _discard_output() -> None:
    """Redirect output that is still to be flushed to /dev/null."""
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "labkit", description=str(labkit.__doc__).splitlines()[0], epilog=EXAMPLES, formatter_class=formatter
    )
    parser.add_argument("--version", action="version", version=f"labkit {labkit.__version__}")
    parser.add_argument("--runs-dir", help="where run folders are stored (default: $LABKIT_RUNS or ./runs)")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, run: Any, help: str, **options: Any) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=help, description=help, allow_abbrev=False, **options)
        sub.add_argument("--runs-dir", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        sub.set_defaults(run=run, parser=sub)
        return sub

    for add in (_add_doctor, _add_launch, add_check_verb, _add_plan, _add_run_verbs, _add_script_verbs, add_sweep_verb):
        add(verb)
    slurm = "submit a training to Slurm, or print its launch file"
    add_slurm_verbs(verbs.add_parser("slurm", help=slurm, description=slurm))
    kaggle = "run a notebook on Kaggle's two T4s, follow it here, fetch its runs"
    add_kaggle_verbs(verbs.add_parser("kaggle", help=kaggle, description=kaggle))
    return parser


def _add_doctor(verb: AddVerb) -> None:
    doctor = verb(
        "doctor",
        _doctor,
        "what this machine has and what to use on it; exits with 1 when a launch would fail (a finding of level stop)",
    )
    doctor.add_argument("--preflight", action="store_true", help="let the ranks sum a number")
    ranks = "measure the collectives of this many ranks (default: one per GPU, or two)"
    doctor.add_argument("--bandwidth", type=int, nargs="?", const=True, default=False, metavar="RANKS", help=ranks)
    doctor.add_argument("--json", action="store_true", help="print findings and facts as JSON, to attach to a report")


def _doctor(arguments: argparse.Namespace, rest: list[str]) -> int:
    machine = labkit.doctor(preflight=arguments.preflight, bandwidth=arguments.bandwidth)
    print(machine.to_json() if arguments.json else machine)
    return 0 if machine.can_train else 1


def _add_launch(verb: AddVerb) -> None:
    start = verb(
        "launch",
        _launch,
        "start a script on every rank; the remaining arguments are passed to the script",
        usage="labkit launch SCRIPT [options] [--] [the script's own options]",
        add_help=False,
    )
    start.add_argument("-h", "--help", action="store_true", help="show this help, and the options of SCRIPT")
    start.add_argument("script", nargs="?", help="one of labkit's own (ddp) or the path of any torchrun script")
    LaunchOptions.add_arguments(start)
    start.add_argument("--watch", action="store_true", help="draw the live view in the terminal")
    lines = "with --hosts: start nothing, print the command to paste on each host"
    start.add_argument("--print", action="store_true", dest="only_print", help=lines)


def _launch(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.help or not arguments.script or "--help" in rest:
        return _launch_help(arguments)
    options = LaunchOptions.parsed(arguments, args=rest, runs_dir=arguments.runs_dir, wait=False)
    if arguments.only_print:
        return _print_lines(arguments.script, options)
    run = labkit.launch(arguments.script, **options.as_keywords())
    if not options.detach:
        run.wait(watch=arguments.watch)
        print(run)
    return 0


def _print_lines(script: str, options: LaunchOptions) -> int:
    from labkit.cluster.hosts import lines_to_paste

    if options.hosts is None:
        raise LabError("--print needs --hosts; on one machine, `labkit launch` prints the torchrun command")
    folder, lines = lines_to_paste(script, options)
    for host, line in lines:
        print(f"# on {host}, within a minute of each other:\n{line}\n")
    print(f"# follow it from any of them: labkit attach {folder.path}")
    return 0


def _add_plan(verb: AddVerb) -> None:
    plan = verb(
        "plan",
        _plan,
        "predict memory and speed of each strategy before a launch; exits with 1 when the script does not fit",
        usage="labkit plan SCRIPT [options] [--] [the script's own options]",
    )
    plan.add_argument("script", help="one of labkit's own (ddp) or the path of a script with the same cells")
    plan.add_argument(
        "--nproc-per-node", type=whole_number, default="auto", metavar="N", help="ranks (default: one per GPU, or two)"
    )
    plan.add_argument("--nodes", type=int, default=1, metavar="N", help="number of hosts (default: 1)")
    plan.add_argument("--network", help="network between hosts: 100GbE, InfiniBand NDR, … or bits/s of one host")
    plan.add_argument("--device", help="T4, 2xT4, A100-40, H100 … (default: this machine)")
    plan.add_argument("--measure", action="store_true", help="measure this machine's speed first (15 seconds)")


def _plan(arguments: argparse.Namespace, rest: list[str]) -> int:
    script = labkit.Script.load(arguments.script)
    if arguments.script in script_names():
        script = completed(script, args=rest)
    check_flags(script, rest)
    options = options_of(script)
    parameters: dict[str, Any] = {
        name: value == "True" if options[name].kind == "flag" else value
        for name, value in read_back(script, rest).items()
    }
    plan = labkit.plan(
        script,
        nproc_per_node=arguments.nproc_per_node,
        nodes=arguments.nodes,
        device=arguments.device,
        network=_number(arguments.network),
        measure=arguments.measure,
        **parameters,
    )
    print(plan)
    return 2 if plan.fits is None else 0 if plan.fits else 1


def _number(text: str | None) -> str | float | None:
    try:
        return text and float(text)
    except ValueError:
        return text


def _launch_help(arguments: argparse.Namespace) -> int:
    arguments.parser.print_help()
    if arguments.script:
        script = labkit.Script.load(arguments.script)
        print(f"\noptions of {script.name}.py:")
        for option in options_of(script).values():
            print(f"  {_with_choices(option)}" + (f"  (default: {option.default})" if option.default else ""))
        extras = extra_options(script) if arguments.script in script_names() else {}
        if extras:
            print("\noptions of extras, which are added when one is used:")
        for extra, options in extras.items():
            print(f"  {extra}: {' '.join(map(_with_choices, options.values()))}")
    return 0 if arguments.help or arguments.script else 2


def _with_choices(option: Option) -> str:
    return option.name + (f" {{{','.join(map(str, option.choices))}}}" if option.choices else "")


def _add_run_verbs(verb: AddVerb) -> None:
    listing = verb("runs", _runs, "list runs: states, the options they differ in, losses")
    listing.add_argument("--clean", action="store_true", help="delete the folders of launches that were killed")
    prune = verb("prune", _prune, "delete the folders of ended runs, with logs and checkpoints")
    prune.add_argument(
        "--keep",
        type=int,
        default=0,
        metavar="N",
        help="except the first N, the newest or the best by --sort (default: 0)",
    )
    prune.add_argument("--yes", action="store_true", help="delete; without it the runs are only listed")
    for sub in (listing, prune):
        sub.add_argument("--script", help="only runs of the script of this name")
        sub.add_argument("--state", choices=get_args(StateName), help="only runs in this state")
        sub.add_argument("--tag", help="only runs with this tag")
        sub.add_argument("--sort", metavar="NAME", help=SORT)
    remove = verb("rm", _rm, "delete the folders of these runs, with logs and checkpoints")
    remove.add_argument("which", nargs="+", help="ids, parts of them, or paths")
    for name, run, help, default in (
        ("attach", _attach, "follow a run until it ends; Ctrl-C leaves it running", "latest"),
        ("stop", _stop, "stop a run on every rank; without an id, the newest active one", None),
        ("stacks", _stacks, "where every rank of a run is now: why is it stuck?", "latest"),
        ("pause", _pause, "let all ranks of a run wait at the end of the same step", "latest"),
        ("resume", _resume, "let a paused run continue", "latest"),
        ("timeline", _timeline, "seconds per phase of the steps of a run that was launched with --profile", "latest"),
        ("report", _report, "write report.html into a run's folder", "latest"),
    ):
        which = "an id, part of one, a path, or latest"
        verb(name, run, help).add_argument("which", nargs="?", default=default, help=which)
    ask = verb("ask", _ask, "the value of an expression on every rank of a running training, at the same step")
    ask.add_argument("which", help="an id, part of one, a path, or latest")
    ask.add_argument("expression", help='for example "loss.item(), x.shape"')
    export = verb("export", _export, "write a run's records for another tool; prints where they are")
    export.add_argument("which", metavar="RUN", help="an id, part of one, a path, or latest")
    export.add_argument("to", metavar="FORMAT", help=", ".join(FORMATS))
    export.add_argument("path", metavar="PATH", nargs="?", help="a file, or a folder for tensorboard and wandb")
    export.add_argument("--project", default="labkit", help="of trackio and wandb (default: labkit)")
    compare = verb("compare", _compare, "compare runs side by side; speed-ups are relative to the first")
    compare.add_argument("which", nargs="*", help="ids or paths, oldest first")
    compare.add_argument("--last", type=int, default=0, metavar="N", help="compare the newest N runs instead")
    compare.add_argument("--sort", metavar="NAME", help=SORT)


def _chosen(arguments: argparse.Namespace) -> RunList:
    options = {name: getattr(arguments, name) for name in ("script", "state", "tag", "sort", "runs_dir")}
    return labkit.runs(**options)


def _prune(arguments: argparse.Namespace, rest: list[str]) -> None:
    if arguments.keep < 0:
        raise LabError(f"--keep needs a number of runs of at least 0, got {arguments.keep}")
    runs = _chosen(arguments)
    if arguments.yes:
        deleted = runs.rm(keep=arguments.keep)
    else:
        deleted = [run.id for run in runs if run.status().is_final][arguments.keep :]
    print("\n".join(map(plain, deleted)) or "nothing to delete")
    if deleted:
        count = f"{len(deleted)} run{'s' * (len(deleted) > 1)}"
        print(f"deleted {count}" if arguments.yes else f"add --yes to delete {count}")


def _rm(arguments: argparse.Namespace, rest: list[str]) -> None:
    for run in [labkit.attach(which, runs_dir=arguments.runs_dir) for which in arguments.which]:
        run.rm()
        print(f"deleted {plain(run.id)}")


def _runs(arguments: argparse.Namespace, rest: list[str]) -> None:
    runs = _chosen(arguments)
    if arguments.clean:
        for folder in runs.unfinished:
            shutil.rmtree(folder)
            print(f"deleted {plain(str(folder))}")
        runs = _chosen(arguments)
    print(repr(runs))


def _attach(arguments: argparse.Namespace, rest: list[str]) -> None:
    run = labkit.attach(arguments.which, runs_dir=arguments.runs_dir)
    if not run.status().is_final and not sys.stdout.isatty():  # the live view shows everything
        print(run, flush=True)
    follow(run)


def _stop(arguments: argparse.Namespace, rest: list[str]) -> None:
    if arguments.which:
        labkit.attach(arguments.which, runs_dir=arguments.runs_dir).stop()
        return
    active = [run for run in labkit.runs(runs_dir=arguments.runs_dir) if not run.status().is_final]
    if not active:
        print("no run is active")
    for run in active[:1]:
        run.stop()


def _stacks(arguments: argparse.Namespace, rest: list[str]) -> None:
    print(labkit.attach(arguments.which, runs_dir=arguments.runs_dir).stacks())


def _ask(arguments: argparse.Namespace, rest: list[str]) -> None:
    answer = labkit.attach(arguments.which, runs_dir=arguments.runs_dir).ask(arguments.expression)
    print(plain(answer.to_string(index=False)))


def _pause(arguments: argparse.Namespace, rest: list[str]) -> None:
    run = labkit.attach(arguments.which, runs_dir=arguments.runs_dir)
    print(f"{plain(run.id)}: paused at the end of step {run.pause()}")


def _resume(arguments: argparse.Namespace, rest: list[str]) -> None:
    labkit.attach(arguments.which, runs_dir=arguments.runs_dir).resume()


def _timeline(arguments: argparse.Namespace, rest: list[str]) -> None:
    print(labkit.attach(arguments.which, runs_dir=arguments.runs_dir).timeline())


def _report(arguments: argparse.Namespace, rest: list[str]) -> None:
    print(plain(str(labkit.attach(arguments.which, runs_dir=arguments.runs_dir).report())))


def _export(arguments: argparse.Namespace, rest: list[str]) -> None:
    run = labkit.attach(arguments.which, runs_dir=arguments.runs_dir)
    print(plain(str(run.export(arguments.to, arguments.path, project=arguments.project))))


def _compare(arguments: argparse.Namespace, rest: list[str]) -> None:
    if arguments.last:
        chosen = list(reversed(labkit.runs(runs_dir=arguments.runs_dir)))[-arguments.last :]
    else:
        chosen = [labkit.attach(which, runs_dir=arguments.runs_dir) for which in arguments.which]
    print(labkit.compare(chosen, sort=arguments.sort))


def _add_script_verbs(verb: AddVerb) -> None:
    write = verb(
        "write",
        _write,
        "print one of labkit's own scripts, composed of a strategy, extras and a task; "
        "without a strategy, list all of them",
        usage="labkit write [STRATEGY [EXTRA ...]] [--task TASK] > mine.py",
    )
    write.add_argument("parts", nargs="*", metavar="STRATEGY [EXTRA ...]", help="fsdp checkpoints precision")
    write.add_argument("--task", default="bytes", help="model, data and loss (default: bytes)")
    diff = verb("diff", _diff, "show the changes from one script to another")
    diff.add_argument("before")
    diff.add_argument("after")


def _write(arguments: argparse.Namespace, rest: list[str]) -> None:
    if not arguments.parts:
        print(labkit.Script.names())
        return
    strategy, *extras = arguments.parts
    print(labkit.Script.load(strategy, *extras, task=arguments.task), end="")


def _diff(arguments: argparse.Namespace, rest: list[str]) -> None:
    before, after = (labkit.Script.load(name) for name in (arguments.before, arguments.after))
    print(after.diff(before))


if __name__ == "__main__":
    sys.exit(main())
