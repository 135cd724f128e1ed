"""`labkit launch` in a terminal, and its help with the options of a script."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import labkit
from labkit.errors import LabError
from labkit.text import plain
from labkit.verbs.adding import AddVerb
from labkit.write import LaunchOptions, extra_options, options_of, script_names

if TYPE_CHECKING:
    from labkit.write import Option

__all__ = ["add_launch_verb"]


def add_launch_verb(verb: AddVerb) -> None:
    start = verb(
        "launch",
        _launch,
        "start a script on every rank; the remaining arguments are passed to the script",
        usage="labkit launch SCRIPT | -m MODULE [options] [--] [the script's own options]",
        add_help=False,
    )
    start.add_argument("-h", "--help", action="store_true", help="show this help, and the options of SCRIPT")
    start.add_argument("script", nargs="?", help="one of labkit's own (ddp) or the path of any torchrun script")
    start.add_argument("-m", dest="module", metavar="MODULE", help="start a module, as torchrun -m does")
    LaunchOptions.add_arguments(start)
    start.add_argument("--watch", action="store_true", help="show the live view in the terminal")
    lines = "with --hosts: start nothing; print the command to paste on each host"
    start.add_argument("--print", action="store_true", dest="only_print", help=lines)


def _launch(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.module and arguments.script:  # it is the module's first argument
        rest.insert(0, arguments.script)
        arguments.script = None
    if arguments.help or not (arguments.script or arguments.module) or "--help" in rest:
        return _launch_help(arguments)
    options = LaunchOptions.parsed(arguments, args=rest, runs_dir=arguments.runs_dir, wait=False)
    if arguments.only_print:
        return _print_lines(arguments.script, options)
    run = labkit.launch(arguments.script, module=arguments.module, **options.as_keywords())
    if not options.detach:
        run.wait(watch=arguments.watch)
        print(run)
        print(f"labkit logs {plain(run.id)} prints what the ranks printed")
    return 0


def _print_lines(script: str, options: LaunchOptions) -> int:
    from labkit.cluster import lines_to_paste

    if options.hosts is None:
        raise LabError("--print needs --hosts; on one machine, `labkit launch` prints the torchrun command")
    folder, lines = lines_to_paste(script, options)
    for host, line in lines:
        print(f"# on {host}, within a minute of each other:\n{line}\n")
    print(f"# follow it from any of them: labkit attach {folder.path}")
    return 0


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
