"""Writes, compares, checks and plans scripts from a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import labkit
from labkit.dataclass_json import to_json
from labkit.errors import LabError
from labkit.launch_options import whole_number
from labkit.text import plain
from labkit.verbs.documents import add_json, show
from labkit.write import script_names

if TYPE_CHECKING:
    from labkit.checking import Findings

EXAMPLES = """examples:
  labkit check train.py lab.ipynb
  labkit check src/
  labkit check --from ddp.py fsdp.py
  labkit check --from fsdp1 accelerate.yaml
  labkit check src/ --output-format sarif > labkit.sarif

A comment `# labkit: ignore[rule]` silences a rule on its line. docs/reference/check.md lists the rules.
"""


def add_script_verbs(verb: Callable[..., argparse.ArgumentParser]) -> None:
    write = verb(
        "write",
        _write,
        "print one of labkit's own scripts, composed of a strategy, extras and a task; "
        "without a strategy, list all of them",
        usage="labkit write [STRATEGY [EXTRA ...]] [--task TASK] > mine.py",
    )
    write.add_argument("parts", nargs="*", metavar="STRATEGY [EXTRA ...]", help="fsdp checkpoints precision")
    write.add_argument("--task", default="bytes", help="model, data and loss (default: bytes)")
    diff = verb("diff", _diff, "show the diff of two scripts")
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


def add_check_verb(verb: Callable[..., argparse.ArgumentParser]) -> None:
    check = verb(
        "check",
        _check,
        "find mistakes in a training script that hang, corrupt or slow down distributed training; "
        "exits with 0 without findings, 1 with findings, 2 if a file cannot be read",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    files = (
        "scripts, notebooks, Markdown pages, accelerate's settings (.yaml, .json), folders, "
        "names of labkit's own scripts, or - for standard input"
    )
    check.add_argument("files", nargs="+", metavar="FILE", help=files)
    check.add_argument(
        "--from",
        dest="before",
        metavar="BEFORE",
        help="compare FILE with this script as a migration, for example from DDP to FSDP: what changed, "
        "and what was forgotten (exits with 1 if anything was); fsdp1: convert accelerate's settings to FSDP2",
    )
    check.add_argument(
        "--output-format",
        choices=("text", "json", "github", "sarif"),
        default="text",
        help="text (default), JSON, annotations for GitHub's pull requests, or SARIF 2.1.0",
    )
    check.add_argument("--json", action="store_const", const="json", dest="output_format", help="--output-format json")


def _check(arguments: argparse.Namespace, rest: list[str]) -> int:
    from labkit.checking import files_in  # as all that the help does not need

    if arguments.before:
        return _check_migration(arguments)
    checked: list[Findings] = []
    unreadable: list[str] = []
    clean = 0
    folders = [file for file in arguments.files if file not in script_names() and Path(file).is_dir()]
    files: list[Any] = [each for file in arguments.files for each in (files_in(file) if file in folders else [file])]
    for file in files:
        try:
            findings = labkit.check(labkit.Script.parse(sys.stdin.read(), name="stdin") if file == "-" else file)
        except LabError as error:  # the other files are still checked
            unreadable.append(str(error))
            print(f"labkit: {plain(str(error))}", file=sys.stderr)
            continue
        if findings or not folders:
            checked.append(findings)
        else:
            clean += 1
    if arguments.output_format == "text":
        for findings in checked:
            print(findings)
        if folders:
            count = "1 file" if len(files) == 1 else f"{len(files)} files"
            print(f"{count} checked, {clean} without findings")
    else:
        print(_formatted(arguments.output_format, checked, unreadable))
    return 2 if unreadable else 1 if any(checked) else 0


def _formatted(output_format: str, checked: list[Findings], unreadable: list[str]) -> str:
    from labkit.checking import github, sarif

    if output_format == "github":
        return github(checked)
    records: Any = sarif(checked, unreadable)
    if output_format == "json":
        records = [record for findings in checked for record in findings.records()]
        records = to_json(records)
    return json.dumps(records, indent=2)


def _check_migration(arguments: argparse.Namespace) -> int:
    if len(arguments.files) != 1:
        raise LabError(f"--from compares two scripts: expected one FILE, got {len(arguments.files)}")
    migration = labkit.check(arguments.before, arguments.files[0])
    if arguments.output_format == "text":
        print(migration)
    elif arguments.output_format == "json":
        print(json.dumps(to_json(migration.record()), indent=2))
    else:
        print(_formatted(arguments.output_format, [migration.forgotten], []))
    return 1 if migration.forgotten else 0


def add_plan_verb(verb: Callable[..., argparse.ArgumentParser]) -> None:
    plan = verb(
        "plan",
        _plan,
        "predict memory and speed of each strategy before a launch; exits with 1 if the script does not fit",
        usage="labkit plan SCRIPT [options] [--] [the script's own options]",
    )
    plan.add_argument("script", help="one of labkit's own (ddp) or the path of any torchrun script")
    plan.add_argument(
        "--nproc-per-node",
        type=whole_number,
        default="auto",
        metavar="N",
        help="ranks (default: the number in --device, or else one per GPU here, or two)",
    )
    plan.add_argument("--nodes", type=int, default=1, metavar="N", help="number of hosts (default: 1)")
    plan.add_argument("--network", help="network between hosts: 100GbE, InfiniBand NDR, … or bits/s of one host")
    plan.add_argument("--device", help="T4, 2xT4, A100-40, 8xH100 … (default: this machine)")
    plan.add_argument("--measure", action="store_true", help="measure this machine's speed first (15 seconds)")
    add_json(plan)


def _plan(arguments: argparse.Namespace, rest: list[str]) -> int:
    plan = labkit.plan(
        arguments.script,
        nproc_per_node=arguments.nproc_per_node,
        nodes=arguments.nodes,
        device=arguments.device,
        network=_number(arguments.network),
        measure=arguments.measure,
        args=rest,
    )
    show(arguments, plan, plan.to_dict)
    return 2 if plan.fits is None else 0 if plan.fits else 1


def _number(text: str | None) -> str | float | None:
    try:
        return text and float(text)
    except ValueError:
        return text
